"""Hashing the input ahead of its use, and remembering the hashes."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.config.sections.data import DataConfig, SourceConfig
from headway.core.errors import DataError
from headway.text.preparing import inputs
from headway.text.preparing.inputs import InputHashes
from headway.text.preparing.prepare import prepare
from headway.text.preparing.units import Unit, units_of
from headway.text.reading import sources as source_module
from headway.text.reading.sources import find_sources


@pytest.fixture
def units(tmp_path: Path) -> list[Unit]:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some words"}\n')
    sources = find_sources([SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in ("a", "b")])
    return [next(units_of(number, source, 100)) for number, source in enumerate(sources)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    names: list[str] = []
    real = inputs._hash_lines
    monkeypatch.setattr(inputs, "_hash_lines", lambda file, *how: (names.append(file.name), real(file, *how))[1])
    yield names


def test_a_file_of_many_units_is_read_once(tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(source_module, "PIECE_BYTES", 100)
    parquet.write_table(
        pyarrow.table({"text": [f"text {n}" for n in range(50)]}), tmp_path / "a.parquet", row_group_size=5
    )
    source = find_sources([SourceConfig(path=str(tmp_path / "a.parquet"))])[0]
    parts = list(units_of(0, source, 100))
    hashes = InputHashes()
    found = [hashes.of(unit)[0]["sha256"] for unit in parts]
    assert len(parts) > 5 and hashed == ["a.parquet"] and len(set(found)) == 1


def test_a_file_stays_as_it_was_listed(units: list[Unit]) -> None:
    path = units[0].pieces[0].file.path
    path.write_text(path.read_text() * 2)
    with pytest.raises(DataError, match="changed"):
        InputHashes().of(units[0])


def test_a_file_that_cannot_be_read_is_named(units: list[Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(inputs, "open_file", lambda *arguments: Broken())
    with pytest.raises(DataError, match="an input file cannot be read: Input/output error") as caught:
        InputHashes().of(units[0])
    assert caught.value.where == str(units[0].pieces[0].file.path)


def test_hashes_are_remembered_when_only_settings_change(
    tmp_path: Path,
    config: Callable[..., DataConfig],
    jsonl: Callable[..., Path],
    documents: Callable[..., list[str]],
    hashed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "_RACY_NS", -1)
    jsonl(tmp_path / "a.jsonl", documents(20))
    for number, validation in enumerate((0.1, 0.2, 0.3)):
        assert not prepare(config("a.jsonl", validation=validation), workers=1).up_to_date
        assert hashed == ["a.jsonl"], f"hashed again by preparation {number}"


def test_hashes_are_saved_on_the_way(
    tmp_path: Path,
    config: Callable[..., DataConfig],
    jsonl: Callable[..., Path],
    documents: Callable[..., list[str]],
    hashed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So what ends in the middle does not begin with hashing everything again."""
    monkeypatch.setattr(inputs, "_RACY_NS", -1)
    monkeypatch.setattr(inputs, "_SAVED_BYTES", 1)
    names = [f"{name}.jsonl" for name in "abcd"]
    for name in names:
        jsonl(tmp_path / name, documents(20, seed=ord(name[0])))
    good = (tmp_path / "c.jsonl").read_text()
    (tmp_path / "c.jsonl").write_text(good + "{")
    with pytest.raises(DataError, match="not valid JSON"):
        prepare(config(names, shard_bytes=100), workers=1)
    assert {"a.jsonl", "b.jsonl"} < set(hashed)
    hashed.clear()
    (tmp_path / "c.jsonl").write_text(good)
    prepare(config(names, shard_bytes=100), workers=1)
    assert "c.jsonl" in hashed and not {"a.jsonl", "b.jsonl"} & set(hashed)


def test_few_bytes_are_not_saved_each_time(tmp_path: Path, units: list[Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_RACY_NS", -1)
    size = units[0].bytes
    monkeypatch.setattr(inputs, "_SAVED_BYTES", 2 * size)
    hashes = InputHashes(keep=tmp_path / "hashes")
    hashes.of(units[0])
    assert not (tmp_path / "hashes").exists()
    hashes.of(units[1])
    assert set(json.loads((tmp_path / "hashes").read_text())) == {str(tmp_path / f"{name}.jsonl") for name in "ab"}


def test_what_is_saved_on_the_way_forgets_nothing(
    tmp_path: Path, units: list[Unit], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second kill must not cost what the first preparation had hashed; in the end what nobody asked for goes."""
    monkeypatch.setattr(inputs, "_RACY_NS", -1)
    monkeypatch.setattr(inputs, "_SAVED_BYTES", 1)
    memory = tmp_path / "hashes"
    InputHashes(keep=memory).of(units[1])
    killed = InputHashes(memory, keep=memory)
    killed.of(units[0])
    again = InputHashes(memory, keep=memory)
    for unit in units:
        again.of(unit)
    assert hashed == ["b.jsonl", "a.jsonl"]
    killed.save(memory)
    assert set(json.loads(memory.read_text())) == {str(tmp_path / "a.jsonl")}

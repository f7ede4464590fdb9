"""Hashing the input ahead of its use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config.data import SourceConfig
from headway.core.errors import DataError
from headway.data.preparing import inputs
from headway.data.preparing.inputs import InputHashes
from headway.data.preparing.units import Unit, units_of
from headway.data.reading.sources import find_sources


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
    monkeypatch.setattr(inputs, "_hash_lines", lambda file, lines: (names.append(file.name), real(file, lines))[1])
    yield names


def test_what_was_begun_is_hashed_once(units: list[Unit], hashed: list[str]) -> None:
    hashes = InputHashes()
    expected = InputHashes().of(units[0])
    hashed.clear()
    hashes.begin(lambda: units[0])
    assert hashes.of(units[0]) == expected and hashed == ["a.jsonl"]
    assert hashes.of(units[1])[0]["path"] == "b.jsonl"


def test_another_unit_gets_its_own_hash(units: list[Unit]) -> None:
    hashes = InputHashes()
    hashes.begin(lambda: units[0])
    assert hashes.of(units[1]) == InputHashes().of(units[1])


def test_a_failure_waits_until_the_unit_is_asked_for(units: list[Unit]) -> None:
    hashes = InputHashes()
    units[0].pieces[0].file.path.unlink()
    hashes.begin(lambda: units[0])
    with pytest.raises((DataError, OSError)):
        hashes.of(units[0])

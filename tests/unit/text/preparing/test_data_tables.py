"""Tables are looked into once, before anything is read of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.console import Progress
from headway.core.errors import DataError
from headway.text.preparing import vocabulary
from headway.text.preparing.prepare import prepare
from headway.text.reading import sources
from headway.text.reading.places import SourceFile
from headway.text.reading.sources import open_tables, pieces_of
from support.sources import find

Configs = Callable[..., DataConfig]

COUNT = 6


def _write(path: Path, texts: list[str], **options: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": texts}), path, **options)


@pytest.fixture
def tables(tmp_path: Path, documents: Callable[..., list[str]]) -> Path:
    """A folder of some."""
    (tmp_path / "tables").mkdir()
    for number in range(COUNT):
        _write(tmp_path / "tables" / f"{number}.parquet", documents(20, seed=number))
    return tmp_path / "tables"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of those that were looked into."""
    names: list[str] = []
    spans_of = sources.parquet_spans

    def counted(file: SourceFile, *arguments: Any) -> Any:
        names.append(file.name)
        return spans_of(file, *arguments)

    monkeypatch.setattr(sources, "parquet_spans", counted)
    return names


def test_each_is_opened_once_for_all_that_a_preparation_does_and_shown(
    config: Configs, tables: Path, opened: list[str], bars_of: Callable[[ModuleType], list[Progress]]
) -> None:
    bars = bars_of(sources)
    expected = [f"{number}.parquet" for number in range(COUNT)]
    for up_to_date in (False, True):
        assert prepare(config(tables, dedup={"documents": True}), workers=1).up_to_date == up_to_date
        assert sorted(opened) == expected
        assert [(bar.label, bar.done, bar.total) for bar in bars] == [("opening tables", COUNT, COUNT)]
        opened.clear()
        bars.clear()


def test_a_damaged_one_is_told_before_a_vocabulary_is_sought(
    config: Configs, tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sought(*_: Any) -> Any:
        raise AssertionError("a vocabulary is sought")

    monkeypatch.setattr(vocabulary, "_how", sought)
    (tables / "4.parquet").write_bytes((tables / "4.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file") as caught:
        prepare(config(tables), workers=1)
    assert caught.value.where == str(tables / "4.parquet")
    assert 'exclude: ["4.parquet"]' in str(caught.value.fix)


def test_none_is_opened_behind_a_limit(config: Configs, tables: Path, opened: list[str]) -> None:
    data = config({"path": str(tables), "limit": "30 documents"}, shard_bytes=1)
    assert prepare(data, workers=1).documents == 30
    # Where a unit ends is seen at the file after it.
    assert opened == ["0.parquet", "1.parquet", "2.parquet"]


def test_one_that_has_changed_is_opened_again(tmp_path: Path, opened: list[str]) -> None:
    _write(tmp_path / "a.parquet", ["text"] * 40, row_group_size=40)
    source = find(tmp_path / "a.parquet")
    open_tables(source)
    assert [piece.span for piece in pieces_of(source)] == [(0, 1)] and len(opened) == 1
    _write(tmp_path / "a.parquet", ["text"] * 40, row_group_size=10)
    assert [piece.span for piece in pieces_of(source)] == [(0, 4)] and len(opened) == 2

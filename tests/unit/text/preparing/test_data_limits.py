"""What lies behind a source's limit may be whatever it is: nobody reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.store import TokenStore
from headway.text.preparing.prepare import prepare
from headway.text.reading.sources import pieces_of
from support.sources import find

Configs = Callable[..., DataConfig]

TEXTS = [f"{number:060}" for number in range(10)]


def _write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".csv":
        path.write_text("".join(f'"{line}"\n' for line in ["text", *texts]))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = arrow.table({"text": texts})
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with arrow.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv"])
@pytest.mark.parametrize("limit", ["10 documents", "600 bytes"])
@pytest.mark.parametrize("dedup", [{}, {"documents": True}])
def test_a_table_behind_a_limit_may_be_none(
    tmp_path: Path, config: Configs, ending: str, limit: str, dedup: dict[str, bool]
) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    _write(folder / f"a.{ending}", TEXTS)
    junk = b"no such column\n"
    if ending == "arrow":  # what cannot be cut into pieces, though whoever reads it finds rows before the damage
        stream = (folder / "a.arrow").read_bytes()
        schema = 8 + int.from_bytes(stream[4:8], "little")
        junk = stream[:-8] + stream[schema : schema + 4] + b"\x10\0\0\0" + b"\xff" * 16
    (folder / f"b.{ending}").write_bytes(junk)
    source = {"path": str(folder), "limit": limit, "format": ending}
    assert prepare(config([source], dedup=dedup), workers=1).documents == 10
    # With one document more it is reached, and ends the preparation whatever `bad_documents` says.
    more = {**source, "limit": limit.replace("10", "11").replace("600", "660")}
    store = tmp_path / "more"
    with pytest.raises(DataError) as error:
        prepare(config([more], dedup=dedup, store=store, bad_documents="skip"), workers=1)
    assert str(error.value.where).startswith(f"{folder}/b.{ending}") and not store.exists()


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("limit", "empty"),
    [("1 documents", 1), ("2 documents", 3), ("60 bytes", 1), ("119 bytes", 3), ("120 bytes", 3), ("3 documents", 6)],
)
def test_documents_without_text_count_as_far_as_a_limit(
    tmp_path: Path, config: Configs, ending: str, limit: str, empty: int
) -> None:
    """As malformed ones do: those before the document that has used it up, or before the first that it does not pay."""
    _write(tmp_path / f"a.{ending}", ["", TEXTS[0], "", "", TEXTS[1], "", "", ""])
    report = prepare(config([{"path": f"a.{ending}", "limit": limit}]), workers=1)
    assert report.empty_documents == empty


def test_without_a_limit_a_table_that_is_none_is_told_before_anything_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "a.parquet", TEXTS)
    (tmp_path / "b.parquet").write_text("junk")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(pieces_of(find("a.parquet", "b.parquet")))


def test_a_cleaning_function_may_fail_behind_a_limit(
    tmp_path: Path, config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "picky", raising=False)
    (tmp_path / "picky.py").write_text("def keep(text):\n    return not text.endswith('9') or 1 / 0\n")
    _write(tmp_path / "a.jsonl", TEXTS)
    _write(tmp_path / "b.jsonl", TEXTS[:5])
    values: dict[str, Any] = {"clean": [{"step": "python", "function": "picky:keep"}]}
    source = {"path": "a.jsonl", "limit": "9 documents"}
    assert prepare(config([source, "b.jsonl"], **values), workers=1).documents == 14
    counts = TokenStore.open(tmp_path / "store").inputs()["sources"][1]["clean"]
    prepare(config("b.jsonl", **values, store=tmp_path / "alone"), workers=1)
    assert counts == TokenStore.open(tmp_path / "alone").inputs()["sources"][0]["clean"]
    with pytest.raises(DataError, match="the cleaning function picky:keep failed: ZeroDivisionError"):
        prepare(config([{**source, "limit": "10 documents"}], **values), workers=1)


def test_a_failure_before_a_limit_is_none_behind_it_though_it_passes(
    tmp_path: Path, config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "moody", raising=False)
    code = "calls = []\ndef keep(text):\n    calls.append(1)\n    return 1 / (len(calls) - 1) > 0\n"
    (tmp_path / "moody.py").write_text(code)
    _write(tmp_path / "a.jsonl", TEXTS)
    values: dict[str, Any] = {"clean": [{"step": "python", "function": "moody:keep"}]}
    with pytest.raises(DataError, match="the cleaning function moody:keep failed"):
        prepare(config([{"path": "a.jsonl", "limit": "100 documents"}], **values), workers=1)

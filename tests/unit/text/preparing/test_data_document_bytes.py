"""`data.max_document_bytes` in a preparation: an error or a counted skip, and what is kept when the limit changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.data import DataConfig
from headway.core.errors import DataError
from headway.data.store import SKIPPED, TokenStore
from headway.text.preparing.prepare import prepare
from headway.text.preparing.report import PrepareReport
from support.runs import store_contents

Configs = Callable[..., DataConfig]
Texts = Callable[..., list[str]]
LARGE = "large " * 500


@pytest.fixture
def corpus(tmp_path: Path, documents: Texts) -> Path:
    """Ten files, of which the fourth has a record of 3 kB."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = documents(40)
    for number in range(10):
        part = texts[4 * number : 4 * number + 4]
        part[1] = LARGE if number == 3 else part[1]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


@pytest.fixture
def given(tmp_path: Path, config: Configs, corpus: Path) -> dict[str, Any]:
    """A vocabulary that stays, and units of a file each."""
    prepare(config(corpus, store=tmp_path / "first"), workers=1)
    return {"tokenizer": {"path": tmp_path / "first" / "tokenizer"}, "shard_bytes": 1}


def test_the_first_one_ends_the_preparation(config: Configs, corpus: Path, given: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        prepare(config(corpus, **given, max_document_bytes=1000), workers=2)
    assert caught.value.what == "the line has 2.9 KiB, and data.max_document_bytes is 1000 B"
    assert caught.value.where == f"{corpus}/3.jsonl:2"
    assert caught.value.fix == "raise data.max_document_bytes, or set data.bad_documents: skip"
    assert caught.value.exit_code == 3


def test_one_that_is_skipped_is_counted_and_listed(
    tmp_path: Path, config: Configs, corpus: Path, given: dict[str, Any]
) -> None:
    report = prepare(config(corpus, **given, max_document_bytes=1000, bad_documents="skip"), workers=2)
    assert (report.documents, report.skipped, report.too_large) == (39, 1, 1)
    assert (
        "1 malformed document skipped (1 of them larger than data.max_document_bytes), listed in" in report.describe()
    )
    (line,) = (tmp_path / "store" / SKIPPED).read_text().splitlines()
    assert json.loads(line)["where"] == f"{corpus}/3.jsonl:2"
    assert TokenStore.open(tmp_path / "store").manifest["sources"][0]["skipped"] == 1
    again = prepare(config(corpus, **given, max_document_bytes=1000, bad_documents="skip"), workers=2)
    assert again.up_to_date and again.too_large == 1


@pytest.mark.parametrize("dedup", [pytest.param({}, marks=pytest.mark.slow), {"documents": True}])
def test_another_limit_does_again_what_it_changes_and_no_more(
    tmp_path: Path, config: Configs, corpus: Path, given: dict[str, Any], dedup: dict[str, bool]
) -> None:
    def run(most: int, store: str = "store") -> PrepareReport:
        values = {"max_document_bytes": most, "bad_documents": "skip", "dedup": dedup, "store": tmp_path / store}
        return prepare(config(corpus, **given, **values), workers=1)

    large = (corpus / "3.jsonl").stat().st_size
    whole = sum(file.stat().st_size for file in corpus.iterdir())
    # From a limit to the next: what is read again.
    steps = ((1000, whole), (10_000, large), (20_000, 0), (1000, large), (2000, large), (2000, 0), (900, whole))
    for most, processed in steps:
        report = run(most)
        assert report.processed_bytes == processed
        assert report.documents == (40 if most > 3000 else 39)
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        run(most, "fresh")
        assert store_contents(tmp_path / "store") == store_contents(tmp_path / "fresh")
        assert TokenStore.open(tmp_path / "store").verify() == []


def test_a_store_from_before_there_was_a_limit_stays(
    tmp_path: Path, config: Configs, corpus: Path, given: dict[str, Any]
) -> None:
    """Its documents were as large as they came."""
    prepare(config(corpus, **given), workers=1)
    for record in (tmp_path / "store" / ".work").glob("*.json"):
        content = json.loads(record.read_text())
        content.pop("most", None)
        content.pop("too_large", None)
        record.write_text(json.dumps(content))
    assert prepare(config(corpus, **given), workers=1).up_to_date
    assert prepare(config(corpus, **given, max_document_bytes=2**30), workers=1).up_to_date


def test_a_file_of_one_line_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from each of its units on to its end."""
    from headway.text.preparing import inputs
    from headway.text.preparing.units import units_of
    from headway.text.reading import sources
    from support.sources import find

    (tmp_path / "a.jsonl").write_text("x" * 100_000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(inputs, "_LINE", 500)
    monkeypatch.setattr(inputs, "_BLOCK", 100)
    read = 0
    blocks = inputs._blocks

    def counted(*arguments: Any) -> Any:
        nonlocal read
        for block in blocks(*arguments):
            read += len(block)
            yield block

    monkeypatch.setattr(inputs, "_blocks", counted)
    (source,) = find(tmp_path / "a.jsonl", most=400)
    hashes = inputs.InputHashes()
    units = list(units_of(0, source, 10_000))
    for unit in units:
        hashes.of(unit)
    assert len(units) == 10 and 100_000 <= read <= 100_000 + 10 * 700

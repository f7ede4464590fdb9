"""What a data report makes of a store's counts."""

from __future__ import annotations

from typing import Any

import pytest

from headway.text.report.counts import Removed, reasons_text, removed_of, removed_share


def source(name: str, read: int, documents: int) -> dict[str, Any]:
    return {"name": name, "read": read, "documents": documents}


def test_cleaning_and_duplicates_are_told_apart() -> None:
    sources = [source("web", 100, 60), source("books", 50, 45)]
    duplicates = {"sources": {"web": {"removed": 30}, "books": {"removed": 0}}}
    assert removed_of(sources, duplicates) == Removed(150, 15, 30)
    assert Removed(150, 15, 30).parts == [(15, 0.1), (30, 0.2)]
    assert removed_of(sources[:1], duplicates) == Removed(100, 10, 30)
    assert removed_of(sources, None) == Removed(150, 45, 0)
    assert removed_of([{"name": "imported", "documents": 3}], None) is None
    assert Removed(0, 0, 0).parts == [(0, None), (0, None)]


def test_shares_are_of_what_was_there() -> None:
    counts = {"documents": 10, "removed": 4, "bytes": 0, "removed_bytes": 0, "exact": 3}
    assert removed_share(counts, "removed") == 0.4
    assert removed_share(counts, "removed_bytes") is None, "there was nothing"
    assert removed_share(counts, "exact") is None and removed_share(counts, "paragraphs_removed") is None


@pytest.mark.parametrize("name", ["decontaminate", "decontaminate-2"])
def test_no_evaluation_set_that_was_found_is_left_out(name: str) -> None:
    sets = {f"set{number}": 10 - number for number in range(8)}
    step = {"name": name, "documents_in": 100, "documents_out": 60, "reasons": {"removed": 40, **sets}}
    assert reasons_text(step, 3) == ", ".join(f"{one} {count}" for one, count in sets.items())
    # A set may have that name.
    assert reasons_text({**step, "reasons": {"removed": 41}}, 3) == "removed 41"


def test_of_other_steps_the_most_frequent_reasons_are_told() -> None:
    reasons = {"few words": 4000, "removed": 30, "bullets": 20, "ellipses": 1}
    step = {"name": "gopher_quality", "documents_in": 100, "documents_out": 70, "reasons": reasons}
    assert reasons_text(step, 3) == "few words 4,000, removed 30, bullets 20"

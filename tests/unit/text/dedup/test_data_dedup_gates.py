"""Limits that stop deduplication, and what they say."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from headway.config.loading.load import load_config
from headway.config.sections.data import DedupConfig
from headway.core.errors import DataError
from headway.text.dedup import Duplicates, TooManyDuplicates, find_duplicates
from headway.text.dedup.gates import check_limits
from support.dedup import fingerprint_units, prose

TEXTS = prose(100, 100)


def search(texts: list[str], sources: list[str] | None = None, size: int = 10, **values: object) -> Duplicates:
    config = DedupConfig.model_validate({"documents": True, **values})
    units = fingerprint_units(texts, config, size)
    named = sources or ["source"] * len(units)

    def describe(unit: int, document: int) -> str:
        return f"{unit}/{document}: {texts[unit * size + document][:20]}"

    return find_duplicates(units, named, config, describe=describe)


def test_a_large_cluster_stops_and_is_shown() -> None:
    texts = TEXTS[:80] + [TEXTS[0]] * 20
    with pytest.raises(TooManyDuplicates) as caught:
        search(texts)
    error = caught.value
    assert isinstance(error, DataError) and error.exit_code == 3
    assert "21 of 100 documents are in one cluster of duplicates (21.0%; the limit is 10.0%)" in error.what
    assert error.where is not None and f"0/0: {TEXTS[0][:20]}" in error.where and f"8/0: {TEXTS[0][:20]}" in error.where
    assert error.fix is not None and error.fix.endswith("data.dedup.max_cluster=0.21")
    assert error.report is not None and error.report["total"]["removed"] == 20
    assert search(texts, max_cluster=0.21).report["total"]["removed"] == 20
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


@pytest.mark.parametrize("copies", range(11, 100))
def test_the_limit_that_the_message_names_is_enough(copies: int) -> None:
    report = {
        "total": {"documents": 100, "removed": copies, "paragraphs": 0, "paragraphs_removed": 0},
        "clusters": {"largest": [{"documents": copies, "kept": [0, 0], "removed": []}]},
        "sources": {},
    }
    with pytest.raises(TooManyDuplicates) as caught:
        check_limits(report, DedupConfig(max_cluster=0.0, max_removed=0.0), None)
    named = dict(pair.split("=") for pair in str(caught.value.fix).split() if pair.startswith("data.dedup."))
    limits = {key.removeprefix("data.dedup."): float(value) for key, value in named.items()}
    check_limits(report, DedupConfig(**limits), None)


def test_a_large_share_of_all_stops() -> None:
    texts = [text for text in TEXTS[:40] for _ in range(3)]
    with pytest.raises(
        TooManyDuplicates, match=r"80 of 120 documents would be removed \(66\.7%; the limit is 50\.0%\)"
    ) as caught:
        search(texts)
    assert caught.value.fix is not None and caught.value.fix.endswith("data.dedup.max_removed=0.667")
    assert search(texts, max_removed=0.667).report["total"]["removed"] == 80


def test_a_source_that_is_a_copy_of_another_stops() -> None:
    sources = ["one"] * 10 + ["two"] * 3
    with pytest.raises(TooManyDuplicates, match="30 of 30 documents of source 'two' would be removed") as caught:
        search(TEXTS + TEXTS[:30], sources)
    assert caught.value.fix is not None and caught.value.fix.endswith("data.dedup.max_removed_per_source=1")
    found = search(TEXTS + TEXTS[:30], sources, max_removed_per_source=1.0)
    assert found.report["sources"]["two"]["removed"] == 30 and found.report["sources"]["one"]["removed"] == 0


def test_all_documents_equal_stops_with_every_value_that_is_needed() -> None:
    texts = [TEXTS[0]] * 50
    with pytest.raises(TooManyDuplicates) as caught:
        search(texts)
    values = dict(re.findall(r"data\.dedup\.(\w+)=(\S+)", str(caught.value)))
    assert list(values) == ["max_cluster", "max_removed", "max_removed_per_source"]
    assert search(texts, **values).report["total"]["removed"] == 49


def test_the_values_offered_are_overrides_that_the_config_takes(tmp_path: Path) -> None:
    with pytest.raises(TooManyDuplicates) as caught:
        search([TEXTS[0]] * 50)
    assert caught.value.fix is not None
    file = tmp_path / "run.yaml"
    file.write_text("base: quickstart\n")
    overrides = caught.value.fix.split("to accept it: ")[1].split(" ")
    assert load_config(file, overrides).data.dedup.max_cluster == 1.0


def test_near_duplicates_count_as_their_cluster() -> None:
    texts = TEXTS[:80] + [f"{TEXTS[0]} {number}" for number in range(20)]
    with pytest.raises(TooManyDuplicates, match="21 of 100 documents are in one cluster"):
        search(texts, near=True)
    # Equal copies of what goes as a near-duplicate belong to the same cluster.
    with pytest.raises(TooManyDuplicates, match="21 of 100 documents are in one cluster"):
        search(TEXTS[:80] + [f"{TEXTS[0]} {number % 4}" for number in range(20)], near=True)


def test_paragraphs_have_limits_too() -> None:
    texts = [f"{TEXTS[0]}\n\n{TEXTS[1]}\n\n{TEXTS[2]}\n\n{text}" for text in TEXTS[10:40]]
    with pytest.raises(TooManyDuplicates, match=r"87 of 120 paragraphs would be removed \(72\.5%"):
        search(texts, documents=False, paragraphs=True)
    assert (
        search(texts, documents=False, paragraphs=True, max_removed=0.725).report["total"]["paragraphs_removed"] == 87
    )


@pytest.mark.parametrize("count", [2, 5, 10])
def test_shares_of_a_few_documents_stop_nothing(count: int) -> None:
    assert search([TEXTS[0]] * count).report["total"]["removed"] == count - 1


def test_eleven_equal_documents_are_no_longer_few() -> None:
    with pytest.raises(TooManyDuplicates, match="11 of 11 documents"):
        search([TEXTS[0]] * 11)


def test_without_a_hook_numbers_are_shown() -> None:
    config = DedupConfig(documents=True)
    with pytest.raises(TooManyDuplicates, match="unit 0, document 0 and unit 0, document 1"):
        find_duplicates(fingerprint_units(["x"] * 20, config, 10), ["a", "a"], config)

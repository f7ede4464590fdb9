"""Paragraphs: where they end, which ones are the same, and a document without some of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from headway.text.dedup import drop_paragraphs, find_duplicates, fingerprint_documents
from headway.text.dedup.paragraphs import hash_paragraphs, split_paragraphs
from support.dedup import fingerprint_units, prose, settings

PARAGRAPHS = settings(paragraphs=True)
LONG = prose(60, 12)


def kept_texts(texts: list[str], sources: list[str] | None = None, size: int = 1) -> list[str]:
    """What is left of texts, in order; documents that go are left out."""
    units = fingerprint_units(texts, PARAGRAPHS, size)
    found = find_duplicates(units, sources or ["source"] * len(units), PARAGRAPHS)
    left, number = [], 0
    for unit, keep, paragraphs in zip(units, found.keep, found.paragraph_keep, strict=True):
        ends = np.cumsum(unit.paragraph_counts)
        for document in range(len(unit)):
            text = texts[number]
            if paragraphs is not None:
                text = drop_paragraphs(text, np.split(paragraphs, ends)[document])
            if keep[document]:
                left.append(text)
            number += 1
    return left


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("", [""]),
        ("one", ["one"]),
        ("one\ntwo", ["one\ntwo"]),
        ("one\n\ntwo", ["one\n\n", "two"]),
        ("one\r\n\r\ntwo", ["one\r\n\r\n", "two"]),
        ("one\n \t\n\n  two\n", ["one\n \t\n\n", "  two\n"]),
        ("one\n\n", ["one\n\n"]),
        ("\n\none", ["\n\none"]),
        ("\n \n\none\n\n\ntwo", ["\n \n\none\n\n\n", "two"]),
        ("  \n\n", ["  \n\n"]),
    ],
)
def test_paragraphs_end_with_their_blank_lines(text: str, paragraphs: list[str]) -> None:
    assert split_paragraphs(text) == paragraphs


@given(st.text(alphabet="ab \n\t\r", max_size=40), st.lists(st.booleans(), min_size=45, max_size=45))
@examples(max_examples=300, deadline=None)
def test_split_loses_nothing_and_dropping_keeps_the_rest(text: str, wishes: list[bool]) -> None:
    paragraphs = split_paragraphs(text)
    assert "".join(paragraphs) == text
    keep = np.array(wishes[: len(paragraphs)])
    left = drop_paragraphs(text, keep)
    kept = [paragraph for paragraph, stays in zip(paragraphs, keep, strict=True) if stays]
    assert left.split() == "".join(kept).split()
    assert left == text if keep.all() else "".join(kept).startswith(left)


def test_dropping_leaves_no_gap_at_the_end() -> None:
    text = "one\n\ntwo\n\n\nthree\n"
    assert drop_paragraphs(text, np.array([True, True, False])) == "one\n\ntwo"
    assert drop_paragraphs(text, np.array([True, False, True])) == "one\n\nthree\n"
    assert drop_paragraphs(text, np.array([False, False, False])) == ""
    assert drop_paragraphs(text, np.array([True, True, True])) == text
    assert drop_paragraphs("\n\n" + text, np.array([True, False, False])) == "\n\none"


def test_blank_lines_before_a_text_take_no_time_when_its_last_paragraph_goes() -> None:
    text = "\n" * 3_000_000 + "one\n \n"  # a look from each of them at all the others would take days
    assert drop_paragraphs(f"{text}two", np.array([True, False])) == text[:-3]


def test_a_document_that_has_changed_is_noticed() -> None:
    with pytest.raises(ValueError, match="2 paragraphs, not 3"):
        drop_paragraphs("one\n\ntwo", np.array([True, True, True]))


def test_spaces_around_a_paragraph_make_no_difference_and_short_ones_have_no_hash() -> None:
    one = hash_paragraphs(f"{LONG[0]}\n\n  {LONG[1]} \n\nshort", 100)
    other = hash_paragraphs(f"short\n\n{LONG[1]}\n\n\n{LONG[0]}\n", 100)
    assert one[:2] == other[:0:-1] and one[2] == other[0] == 0
    assert all(one[:2]) and one[0] != one[1]
    assert hash_paragraphs("é" * 50, 100)[0] != 0
    assert hash_paragraphs("é" * 50, 101)[0] == 0


def test_one_of_equal_paragraphs_stays() -> None:
    shared = LONG[0]
    texts = [f"{LONG[1]}\n\n{shared}", f"{shared}\n\n{LONG[2]}", f"{LONG[3]}\n\n{shared}\n\n{LONG[4]}"]
    left = kept_texts(texts)
    assert "\n\n".join(left).count(shared) == 1
    assert all(any(text in each for each in left) for text in LONG[1:5])


def test_a_paragraph_repeated_in_a_document_stays_once() -> None:
    (left,) = kept_texts([f"{LONG[0]}\n\n{LONG[1]}\n\n{LONG[0]}"])
    assert left == f"{LONG[0]}\n\n{LONG[1]}"


def test_the_first_source_keeps_its_paragraphs() -> None:
    texts = [f"{LONG[0]}\n\n{LONG[number]}" for number in range(1, 9)]
    for shift in range(8):
        left = kept_texts(texts[shift:] + texts[:shift], ["first"] + ["second"] * 7)
        assert left[0] == texts[shift] and not any(LONG[0] in text for text in left[1:])


def test_what_stays_does_not_depend_on_order_or_units() -> None:
    texts = [f"{LONG[number % 5]}\n\n{LONG[5 + number % 7]}\n\n{number}" for number in range(30)]
    wanted = sorted(kept_texts(texts))
    assert len("".join(wanted)) < len("".join(texts)) / 2
    for order, size in ((texts[::-1], 1), (texts, 7), (sorted(texts), 30), (texts[11:] + texts[:11], 4)):
        assert sorted(kept_texts(order, size=size)) == wanted


def test_a_document_that_nothing_is_left_of_goes_and_is_counted() -> None:
    texts = [f"{LONG[0]}\n\n{LONG[1]}", LONG[0], f"{LONG[1]}\n\nshort"]
    units = fingerprint_units(texts, PARAGRAPHS, 3)
    found = find_duplicates(units, ["source"], PARAGRAPHS)
    total = found.report["total"]
    assert total["emptied"] == total["removed"] == 3 - found.keep[0].sum()
    assert total["paragraphs"] == 5 and total["paragraphs_removed"] == 2
    assert found.paragraph_keep[0] is not None and len(found.paragraph_keep[0]) == 5
    assert sorted(" ".join(kept_texts(texts)).split()) == sorted((LONG[0] + " " + LONG[1] + " short").split())


@pytest.mark.parametrize("lead", ["\n\n", "  \n\n", "\r\n\r\n"])
def test_blank_lines_before_a_text_are_no_text_that_is_left(lead: str) -> None:
    found = find_duplicates(fingerprint_units([LONG[0], lead + LONG[0]], PARAGRAPHS, 2), ["source"], PARAGRAPHS)
    assert found.report["total"]["emptied"] == found.report["total"]["removed"] == 1
    assert kept_texts([LONG[0], lead + LONG[0]]) in ([LONG[0]], [lead + LONG[0]])


def test_paragraphs_of_documents_that_go_do_not_count() -> None:
    config = settings(documents=True, paragraphs=True)
    text = f"{LONG[0]}\n\n{LONG[1]}"
    found = find_duplicates(fingerprint_units([text, text], config, 1), ["source"] * 2, config)
    assert [keep.tolist() for keep in found.keep] == [[True], [False]]
    assert found.paragraph_keep == [None, None]
    assert found.report["total"]["paragraphs_removed"] == 0


def test_without_paragraphs_no_masks_are_made() -> None:
    config = settings(documents=True)
    found = find_duplicates([fingerprint_documents(["a\n\nb"], config)], ["source"], config)
    assert found.paragraph_keep == [None]

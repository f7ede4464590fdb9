"""Words of texts as hashes."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from headway.text.dedup import fingerprints as module
from headway.text.dedup.fingerprints import hash_words, normal_bytes
from support.dedup import prose


def words_of(*texts: str) -> list[list[int]]:
    hashes, counts = hash_words([normal_bytes(text, text.encode("utf-8", "surrogatepass")) for text in texts])
    return [part.tolist() for part in np.split(hashes, np.cumsum(counts)[:-1])]


def spelled(text: str) -> str:
    return normal_bytes(text, text.encode()).decode()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello, World!", "hello world"),
        ("snake_case\tand\n\nmore", "Snake  CASE and more"),
        ("don't", "DON T"),
        ("“quoted” — text…", "quoted text"),
        ("Ärger im Café", "ärger im CAFÉ"),
        (unicodedata.normalize("NFD", "Ärger im Café"), "Ärger im Café"),
        ("a\x00b\x7fc", "a b c"),
        ("ΑΒΓ ДЕЖ", "αβγ деж"),
        ("10 000€", "10, 000"),
    ],
)
def test_case_punctuation_and_form_make_no_difference(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)
    assert all(words_of(one))


@pytest.mark.parametrize(
    ("one", "other"), [("a b", "b a"), ("ab", "a b"), ("café", "cafe"), ("x1", "x2"), ("a", "a a"), ("", "a")]
)
def test_other_words_make_a_difference(one: str, other: str) -> None:
    assert words_of(one) != words_of(other)


def test_an_ascii_word_is_the_same_among_others() -> None:
    plain, among = words_of("Deduplication works", "Deduplication works – naïvely")
    assert among[:2] == plain


def test_where_scripts_have_no_spaces_each_character_is_a_word() -> None:
    assert spelled("Das ist 日本語です。").split() == ["das", "ist", *"日本語です"]
    assert spelled("ภาษาไทย").split() == list("ภาษาไทย")
    assert spelled("x\U00020000\U00020001y").split() == ["x", "\U00020000", "\U00020001", "y"]
    assert spelled("한국어 문장").split() == ["한국어", "문장"]
    assert spelled("हिन्दी भाषा").split() == ["हिन्दी", "भाषा"]


def test_what_is_no_word_leaves_none() -> None:
    assert words_of("", "  \n", "!?…", "😀 👍🏽", "\U000e0041") == [[], [], [], [], []]


def test_every_word_of_a_corpus_has_its_own_hash() -> None:
    vocabulary = sorted({word for text in prose(100, 600) for word in spelled(text).split()})
    assert len(vocabulary) > 2500
    (hashes,) = words_of(" ".join(vocabulary))
    assert len(set(hashes)) == len(vocabulary)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200])
def test_every_byte_of_a_word_counts(length: int) -> None:
    word = "x" * length
    changed = [word[:place] + "y" + word[place + 1 :] for place in range(length)]
    (hashes,) = words_of(" ".join([word, word + "x", *changed]))
    assert len(set(hashes)) == length + 2


def test_a_word_does_not_depend_on_what_follows_it() -> None:
    one, other = words_of("abc def", "abc xyz")
    assert one[0] == other[0] and one[1] != other[1]


def test_huge_words_and_lines_pass() -> None:
    once, again = words_of("a" * 1_000_000, "a " * 1_000_000)
    assert len(once) == 1 and len(again) == 1_000_000 and len(set(again)) == 1


def test_blocks_cut_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*prose(100, 20), "", "end"]
    whole = words_of(*texts)
    for size in (1, 7, 100):
        monkeypatch.setattr(module, "_BLOCK", size)
        assert words_of(*texts) == whole


@given(st.lists(st.text(max_size=60), max_size=6))
@examples(max_examples=200, deadline=None)
def test_any_text_has_the_words_of_its_spelling(texts: list[str]) -> None:
    found = words_of(*texts) if texts else []
    for text, words in zip(texts, found, strict=True):
        assert len(words) == len(normal_bytes(text, text.encode("utf-8", "surrogatepass")).split())
        assert words == words_of(text)[0]


def test_half_characters_do_no_harm() -> None:
    assert words_of("a \ud800 b")[0] == words_of("a b")[0]

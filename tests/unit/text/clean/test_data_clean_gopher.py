"""Gopher's rules: each drops a document, and keeps one that is just inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.sections.clean import GopherRepetitionStep
from headway.text.clean.counts import Drop
from headway.text.clean.repetition import GopherRepetition

Ask = Callable[..., str | None]


def words(count: int, length: int = 5) -> str:
    """Different words of letters, two of them stop words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    made = ["the", "with"]
    made += [
        (letters[i % 26] + letters[i // 26 % 26] + letters[i // 676 % 26] + letters[i // 17576]).ljust(length, "x")
        for i in range(count - 2)
    ]
    return " ".join(made)


def test_prose_passes_every_rule(prose: str, reason: Ask) -> None:
    assert reason(prose, "gopher_quality") is None
    assert reason(prose, "gopher_repetition") is None


QUALITY = [
    ("few words", words(50), words(49)),
    ("many words", words(100_000), words(100_001)),
    # 60 words of which n are long: a mean of just up to 10, and just above it.
    (
        "mean word length",
        " ".join(["with the", *["a" * 10] * 48, "b" * 23]),
        " ".join(["with the", *["a" * 10] * 48, "b" * 24]),
    ),
    ("mean word length", " ".join(["the", "that", *["abc"] * 60]), " ".join(["the", "that", "a", *["abc"] * 59, "a"])),
    ("hash symbols", words(60) + " #" * 6, words(60) + " #" * 7),
    ("ellipses", words(56) + "... … c... …  x", words(56) + "... … c... …" + " …" * 4 + " x"),
    ("bullet lines", "- " + words(60) + "\n- a" * 8 + "\nplain", "- " + words(60) + "\n- a" * 18 + "\nplain"),
    ("bullet lines", "• " + words(60) + "\n\n• b" * 8 + "\nplain", "• " + words(60) + "\n\n• b" * 18),
    ("ellipsis lines", words(60) + "\nab cd...\nab\ncd", words(60) + "\nab cd...\nef…\nab"),
    ("alphabetic words", words(80) + " 123" * 20, words(80) + " 123" * 21),
    ("stop words", words(60), words(60).replace("with", "wide")),
]


@pytest.mark.parametrize(("rule", "kept", "dropped"), QUALITY)
def test_quality_rules(rule: str, kept: str, dropped: str, reason: Ask) -> None:
    assert reason(kept, "gopher_quality") is None
    assert reason(dropped, "gopher_quality") == rule


def test_two_different_stop_words_in_any_spelling(reason: Ask) -> None:
    plain = words(60).replace("the", "oxx").replace("with", "oyy")
    assert reason(plain + " the the the", "gopher_quality") == "stop words"
    assert reason(plain + " THE (that)", "gopher_quality") is None
    assert reason(plain + " other bathe", "gopher_quality") == "stop words"
    assert reason(plain, "gopher_quality", min_stop_words=0) is None
    assert reason(plain + " der und", "gopher_quality", stop_words=["der", "und"]) is None


def test_limits_come_from_the_config(reason: Ask) -> None:
    assert reason(words(40), "gopher_quality", min_words=40) is None
    assert (
        reason(words(60) + " #" * 30, "gopher_quality", max_symbol_to_word_ratio=1.0, min_alphabetic_words=0.5) is None
    )


def lines(distinct: int, repeats: int, length: int = 40) -> str:
    """Lines of different words of which some repeat the first."""
    made = [" ".join(f"w{row}x{column}" for column in range(length // 5)) for row in range(distinct)]
    return "\n".join([*made, *made[:1] * repeats])


# N-gram rules are put out of reach where lines are meant, and the other way round.
FREE = {"max_top_ngram_characters": {}, "max_duplicate_ngram_characters": {}}
LINES_FREE = {
    f"max_duplicate_{name}": 1.0 for name in ("lines", "paragraphs", "line_characters", "paragraph_characters")
}


def test_duplicate_lines(reason: Ask) -> None:
    short = "\n".join(["ab", *(f"a much longer line that tells {i} of something" for i in range(6))])
    assert reason(short + "\nab" * 3, "gopher_repetition", **FREE) is None  # 3 of 10 lines, few characters
    assert reason(short + "\nab" * 4, "gopher_repetition", **FREE) == "duplicate lines"
    assert reason(lines(9, 2), "gopher_repetition", **FREE) is None
    assert reason(lines(7, 2), "gopher_repetition", **FREE) == "duplicate line characters"


def test_white_space_makes_no_difference_to_lines(reason: Ask) -> None:
    text = "\n\n\n".join(f"line {i}" for i in range(7)) + "\n   line 1   \n\tline 2" * 2
    assert reason(text, "gopher_repetition", **FREE) == "duplicate lines"


def test_duplicate_paragraphs(reason: Ask) -> None:
    # Lines are repeated in a tenth of all, paragraphs in more than three.
    long = "\n".join(f"this is line {i} of one long paragraph" for i in range(40))
    assert reason(long + "\n\nab\n\ncd\n\nab", "gopher_repetition", **FREE) is None
    assert reason(long + "\n\nab\n\nab\n\nab", "gopher_repetition", **FREE) == "duplicate paragraphs"
    block = "\n".join(f"this is line {i} of some paragraph" for i in range(6))
    free = FREE | {"max_duplicate_lines": 1.0, "max_duplicate_line_characters": 1.0, "max_duplicate_paragraphs": 1.0}
    assert reason(f"{block}\n\n{long}\n\n{block}", "gopher_repetition", **free) is None
    assert (
        reason(f"{block}\n\n{block}\n\n{long[:300]}", "gopher_repetition", **free) == "duplicate paragraph characters"
    )


@pytest.mark.parametrize(("n", "limit"), [(2, 0.20), (3, 0.18), (4, 0.16)])
def test_top_ngrams(n: int, limit: float, reason: Ask) -> None:
    gram = " ".join(["abcd"] * 1 + [f"efg{i}" for i in range(n - 1)])
    others = [f"o{i:03d}" for i in range(100)]
    times = int(limit * 100 / n)
    free = LINES_FREE | {"max_duplicate_ngram_characters": {}, "max_top_ngram_characters": {n: limit}}

    def text(count: int) -> str:
        rest = others[: 100 - n * count]
        return " ".join([f"{gram} {word}" for word in rest[:count]] + rest[count:])

    assert reason(text(times), "gopher_repetition", **free) is None
    assert reason(text(times + 1), "gopher_repetition", **free) == f"top {n}-gram"


@pytest.mark.parametrize(("n", "limit"), [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)])
def test_duplicate_ngrams(n: int, limit: float, reason: Ask) -> None:
    free = LINES_FREE | {"max_top_ngram_characters": {}, "max_duplicate_ngram_characters": {n: limit}}

    def text(repeated: int) -> str:
        once = [f"w{i:03d}" for i in range(200 - repeated)]
        return " ".join([*once, *once[:repeated]])

    assert reason(text(int(200 * limit)), "gopher_repetition", **free) is None
    assert reason(text(int(200 * limit) + 1), "gopher_repetition", **free) == f"duplicate {n}-grams"


def test_all_ngram_limits_are_asked_and_the_first_names_the_reason(reason: Ask) -> None:
    once = [f"w{i:03d}" for i in range(200)]
    text = " ".join(once + once[:24])  # 24 of 224: above a tenth, which is for 10-grams alone
    assert reason(text, "gopher_repetition", **LINES_FREE) == "duplicate 10-grams"


def reference(text: str, step: GopherRepetitionStep) -> set[str]:
    """Which n-gram rules a text breaks, by the definition."""
    tokens = text.split()
    total = sum(map(len, tokens))
    broken = set()
    for n, limit in {**step.max_top_ngram_characters, **step.max_duplicate_ngram_characters}.items():
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        if not grams:
            continue
        if n in step.max_top_ngram_characters:
            counts = Counter(grams)
            most = max(counts.values())
            best = max((g for g in counts if counts[g] == most), key=lambda g: (len("".join(g)), -grams.index(g)))
            starts, name = [i for i, g in enumerate(grams) if g == best and most > 1], f"top {n}-gram"
        else:
            starts, name = [i for i, g in enumerate(grams) if g in grams[:i]], f"duplicate {n}-grams"
        covered = {i + j for i in starts for j in range(n)}
        if sum(len(tokens[i]) for i in covered) / total > limit:
            broken.add(name)
    return broken


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "é", "dddd", "eeeee", "語語"]), min_size=1, max_size=60))
def test_ngram_rules_are_those_of_the_definition(tokens: list[str]) -> None:
    text = " ".join(tokens)
    step = GopherRepetitionStep(**LINES_FREE)  # type: ignore[arg-type]
    result = GopherRepetition(step).apply(text)
    broken = reference(text, step)
    assert isinstance(result, Drop) == bool(broken)
    if isinstance(result, Drop):
        assert result.reason in broken

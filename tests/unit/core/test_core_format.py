"""Numbers as people read them."""

from __future__ import annotations

import pytest

from headway.core.format import counted, format_bytes, format_count, format_seconds, printable
from headway.core.random import derive_seed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.5, "0.50"),
        (123.4, "123"),
        (1234, "1,234"),
        (9999, "9,999"),
        (10_000, "10.0k"),
        (41_200, "41.2k"),
        (1_500_000, "1.5M"),
        (2_000_000_000, "2.0B"),
        (3e12, "3.0T"),
        (-41_200, "-41.2k"),
        (999_949, "999.9k"),
        (999_950, "1.0M"),
        (999_960_000, "1.0B"),
    ],
)
def test_counts(value: float | None, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**30, "1.0 GiB"),
        (5 * 2**50, "5120.0 TiB"),
        (2**20 - 60, "1023.9 KiB"),
        (2**20 - 1, "1.0 MiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert format_bytes(value) == text


def test_things_that_are_counted() -> None:
    assert [counted(n, "micro-batch") for n in (0, 1, 2)] == ["0 micro-batches", "1 micro-batch", "2 micro-batches"]
    assert [counted(n, "lane") for n in (1, 1234)] == ["1 lane", "1,234 lanes"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 m 0 s"),
        (75, "1 m 15 s"),
        (3599.7, "1 h 0 m"),
        (8040, "2 h 14 m"),
        (200_000, "2 d 7 h"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert format_seconds(value) == text


def test_seeds_are_a_function_of_their_purpose() -> None:
    # These values are part of the promise: another hash would change every run.
    assert derive_seed(0, "init") == derive_seed(0, "init")
    assert derive_seed(1, "dropout", 2, 3, 4) == 4721062934120925925


def test_seeds_of_neighbours_are_unrelated() -> None:
    seeds = {derive_seed(seed, "dropout", step, lane) for seed in range(5) for step in range(40) for lane in range(5)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    bits = [
        bin(derive_seed(0, "dropout", step) ^ derive_seed(0, "dropout", step + 1)).count("1") for step in range(500)
    ]
    assert 30 < sum(bits) / len(bits) < 33  # half of 63 bits change, on average
    # Parts are told apart: (1, 23) is not (12, 3).
    assert derive_seed(0, 1, 23) != derive_seed(0, 12, 3)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 文字", "plain, größer, 文字"),
        ("red \x1b[31m", r"red \x1b[31m"),
        ("a\nb\tc\rd\x7f", r"a\nb\tc\rd\x7f"),
        ("\x9b31m \x85 \u2028", r"\x9b31m \x85 \u2028"),
        ("gpj.\u202eexe \u2066x\u2069 \u200f", r"gpj.\u202eexe \u2066x\u2069 \u200f"),
        ("\udce9 \U000e0001", r"\udce9 \U000e0001"),
        ("你好。\u3000世界\u00a0!", "你好。\u3000世界\u00a0!"),
    ],
)
def test_text_of_others_cannot_steer_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_to_be_kept_is_kept() -> None:
    assert printable("a\n\x1b\tb\u200d", keep="\n\u200d") == "a\n\\x1b\\tb\u200d"

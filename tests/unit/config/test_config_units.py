"""Quantities as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Interval
from headway.config.units import Amount, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("value", "unit", "count"),
    [
        (500, "tokens", 500),
        (5e3, "tokens", 5000),
        ("500", "tokens", 500),
        ("1_000", "tokens", 1000),
        ("1,000", "rows", 1000),
        ("12,345,678", "tokens", 12_345_678),
        ("64k", "tokens", 64_000),
        ("64Ki", "tokens", 65_536),
        ("2B tokens", "tokens", 2 * 10**9),
        ("2.3B", "tokens", 2_300_000_000),
        ("16.1k", "tokens", 16_100),
        ("8.2M", "tokens", 8_200_000),
        ("1e3", "tokens", 1000),
        ("500 tokens", "tokens", 500),
        ("1 token", "tokens", 1),
        ("256 MB", "bytes", 256_000_000),
        ("1 GiB", "bytes", 2**30),
    ],
)
def test_counts(value: Any, unit: str, count: int) -> None:
    assert parse_count(value, unit) == count


@pytest.mark.parametrize(
    "value",
    [
        "",
        "many",
        "1,5B",
        "0,5k",
        "10,00",
        "1,0000",
        "1e999999",
        "1.5",
        "1.0001k",
        "5 rows",
        "2B rows",
        "5 6",
        "-5",
        1.5,
        True,
        None,
        float("inf"),
        float("nan"),
    ],
)
def test_what_is_no_count_of_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match=r"quantity|number"):
        parse_count(value, "tokens")


@pytest.mark.parametrize("value", ["250 B", "2B", "64 b"])
def test_bytes_are_not_taken_for_billions(value: str) -> None:
    with pytest.raises(ValueError, match=r"could be bytes or billions; write '[0-9]+ bytes' or '[0-9]+ GB'"):
        parse_count(value, "bytes")
    with pytest.raises(ValueError, match="bytes or billions"):
        Amount.parse(value)
    assert parse_count("100 bytes", "bytes") == 100


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (500, (500, "steps")),
        ("500", (500, "steps")),
        ("1 step", (1, "steps")),
        ("2k steps", (2000, "steps")),
        ("5M steps", (5_000_000, "steps")),
        ("1B tokens", (10**9, "tokens")),
        ("90 s", (90, "seconds")),
        ("10 min", (600, "seconds")),
        ("10 minutes", (600, "seconds")),
        ("1.5 h", (5400, "seconds")),
        ("2 days", (172_800, "seconds")),
        (Interval(3, "steps"), (3, "steps")),
    ],
)
def test_intervals(value: Any, interval: tuple[int, Any]) -> None:
    assert Interval.parse(value) == Interval(*interval)


@pytest.mark.parametrize("value", [0, "0 steps", "0.5 s", "soon", "5 weeks", True, "10m", "10 m", "1,5 h"])
def test_what_is_no_interval(value: Any) -> None:
    with pytest.raises(ValueError, match=r"quantity|number|at least|minutes or millions"):
        Interval.parse(value)


@given(st.integers(1, 10**15), st.sampled_from(["steps", "tokens", "seconds"]))
def test_an_interval_reads_back_what_it_prints(amount: int, unit: Any) -> None:
    assert Interval.parse(str(Interval(amount, unit))) == Interval(amount, unit)


def test_a_time_on_the_command_line_is_written_as_in_a_config() -> None:
    assert [parse_seconds(text) for text in ("10s", "10 s", "2 min", "1h")] == [10, 10, 120, 3600]
    for text in ("10", "10 steps", "0s", "1.5s", "soon"):
        with pytest.raises(ValueError, match=r"time|second|quantity"):
            parse_seconds(text)

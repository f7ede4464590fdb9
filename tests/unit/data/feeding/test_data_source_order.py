"""Which source a row is taken from: counts follow without looking, and shares hold in every window."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.feeding.source_order import FRACTION, boundaries, counts_before, counts_between, sources_of

#: Weights of sources, some of them none.
WEIGHTS = st.lists(st.one_of(st.just(0), st.integers(1, 10_000)), min_size=1, max_size=6).filter(any)


def shares_of(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@given(weights=WEIGHTS, rows=st.integers(1, 40), first=st.integers(0, 5000), steps=st.integers(0, 70))
@settings(max_examples=200, deadline=None)
def test_counts_are_those_of_looking_at_every_row(weights: list[int], rows: int, first: int, steps: int) -> None:
    bounds = boundaries(shares_of(weights), rows)
    sources = sources_of(bounds, first, first + steps, rows, seed=5)
    assert sources.shape == (steps, rows)
    wanted = np.bincount(sources.ravel(), minlength=len(weights)).tolist()
    assert counts_between(bounds, first, first + steps) == wanted
    assert sum(counts_before(bounds, first)) == first * rows


@given(weights=WEIGHTS, rows=st.integers(1, 40), bit=st.integers(0, 12), window=st.integers(0, 2**20))
@settings(max_examples=300, deadline=None)
def test_in_every_aligned_window_a_source_has_its_share_to_within_one_row(
    weights: list[int], rows: int, bit: int, window: int
) -> None:
    shares = shares_of(weights)
    counts = counts_between(boundaries(shares, rows), window << bit, (window + 1) << bit)
    for count, share in zip(counts, shares, strict=True):
        # A bound is rounded to 2^-41 rows, which a window of 2^12 steps sees that many times.
        assert abs(count - share * (rows << bit)) < 1 + Fraction(1, 2**20)
        assert share or not count, "a weight of 0 means none"


@given(weights=WEIGHTS, rows=st.integers(1, 40), step=st.integers(0, 2**38))
@settings(max_examples=200, deadline=None)
def test_from_the_start_on_a_source_has_its_share_to_within_the_logarithm(
    weights: list[int], rows: int, step: int
) -> None:
    shares = shares_of(weights)
    counts = counts_before(boundaries(shares, rows), step)
    assert sum(counts) == step * rows
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - share * step * rows) <= step.bit_count() + Fraction(step, 2**FRACTION)


@given(whole=st.integers(0, 30), rest=WEIGHTS, rows=st.integers(31, 40), step=st.integers(0, 2**38))
@settings(max_examples=100, deadline=None)
def test_a_whole_number_of_rows_is_met_exactly_in_each_step(whole: int, rest: list[int], rows: int, step: int) -> None:
    others = [share * Fraction(rows - whole, rows) for share in shares_of(rest)]
    for place in range(len(others) + 1):
        shares = [*others[:place], Fraction(whole, rows), *others[place:]]
        assert counts_between(boundaries(shares, rows), step, step + 1)[place] == whole


def test_rows_of_a_step_take_turns_in_no_visible_order() -> None:
    sources = sources_of(boundaries([Fraction(1, 2), Fraction(1, 2)], 8), 0, 4000, 8, seed=1)
    assert (sources.sum(axis=1) == 4).all()
    # Each place of the step sees each source about as often (2000 times; six standard deviations are 190).
    assert abs(sources.sum(axis=0) - 2000).max() < 190
    assert len(np.unique(sources, axis=0)) > 60, "of the 70 ways there are"
    other = sources_of(boundaries([Fraction(1, 2), Fraction(1, 2)], 8), 0, 4000, 8, seed=2)
    assert 0.4 < (sources == other).mean() < 0.6


@pytest.mark.parametrize(("first", "last"), [(0, 7), (3, 4), (1000, 1003)])
def test_a_step_does_not_depend_on_those_asked_for_with_it(first: int, last: int) -> None:
    bounds = boundaries(shares_of([3, 1, 2]), 24)
    alone = [sources_of(bounds, step, step + 1, 24, seed=9)[0] for step in range(first, last)]
    assert np.array_equal(sources_of(bounds, first, last, 24, seed=9), alone)

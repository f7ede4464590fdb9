"""The computed permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.feeding.order import RowOrder, permute


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_every_value_comes_exactly_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("bits", range(1, 17))
def test_bijection_around_powers_of_two(bits: int) -> None:
    for size in (2**bits - 1, 2**bits, 2**bits + 1):
        assert len(np.unique(permute(np.arange(size), size, key=bits))) == size


@pytest.mark.parametrize("size", [10**12, 10**12 + 1, 2**40, 2**40 + 1, 3 * 10**17, 2**62])
def test_huge_ranges_stay_inside_and_do_not_collide(size: int) -> None:
    index = np.linspace(0, size - 1, 20_000, dtype=np.float64).astype(np.int64).clip(0, size - 1)
    index = np.unique(np.concatenate([index, np.arange(10_000)]))
    values = permute(index, size, key=3)
    assert values.min() >= 0 and values.max() < size
    assert len(np.unique(values)) == len(index)


def test_one_value_does_not_depend_on_the_others_asked_for() -> None:
    whole = permute(np.arange(1000), 1000, key=5)
    assert all(permute(np.array([i]), 1000, key=5)[0] == whole[i] for i in range(0, 1000, 37))
    assert np.array_equal(permute(np.arange(1000).reshape(10, 100), 1000, key=5), whole.reshape(10, 100))


def test_mixes_like_a_random_permutation() -> None:
    size = 100_000
    values = permute(np.arange(size), size, key=11)
    # Neighbours, low bits and position are uncorrelated; about one fixed point is expected.
    assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.02
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert abs((values[: size // 2] % 2).mean() - 0.5) < 0.01
    assert (values == np.arange(size)).sum() < 10
    # Rows of the first tenth land evenly in ten bins (chi-square with 9 degrees of freedom; 40 has p < 1e-5).
    counts = np.bincount(values[: size // 10] * 10 // size, minlength=10)
    assert ((counts - 1000) ** 2 / 1000).sum() < 40


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_small_ranges_reach_every_place_about_equally(size: int) -> None:
    keys = 2000
    firsts = [int(permute(np.array([0]), size, key)[0]) for key in range(keys)]
    counts = np.bincount(firsts, minlength=size)
    assert counts.min() > 0.8 * keys / size


def test_keys_give_unrelated_orders() -> None:
    one, two = (permute(np.arange(10_000), 10_000, key) for key in (0, 1))
    assert (one == two).sum() < 10


@pytest.mark.parametrize(("index", "size"), [([0], 0), ([-1], 5), ([5], 5), ([0], 2**62 + 1)])
def test_out_of_range_is_refused(index: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        permute(np.array(index), size, 0)


def test_order_crosses_epochs_without_losing_a_row() -> None:
    order = RowOrder(10, seed=1)
    rows = np.concatenate([order.at(0, 7), order.at(7, 9), order.at(16, 24)])
    epochs = rows.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert len(order.at(5, 0)) == 0
    assert not np.array_equal(RowOrder(10, seed=2).at(0, 10), epochs[0])

"""Rounding to bf16 by random bits that depend only on where they are used."""

import math

import numpy as np
import pytest
import torch

from headway.core.random import derive_seed
from headway.parallel.stochastic_rounding import RoundingKey, random_words, round_stochastically

KEY = RoundingKey(seed=3, step=7, name="layers.0.weight")


def rounded(x: torch.Tensor, key: RoundingKey = KEY, first: int = 0) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    round_stochastically(x.clone(), random_words(key, first, x.numel()), out)
    return out


@pytest.mark.parametrize("lower", [1.0, -1.0, 0.02, -3e-39])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.99])
def test_the_mean_is_the_number(lower: float, fraction: float) -> None:
    """Also of numbers below the smallest normal one; rounded to nearest, all would become one neighbour."""
    below = torch.tensor(lower).bfloat16()
    above = torch.nextafter(below, below * 2)
    gap = (above - below).float()
    x = (below.float() + fraction * gap).expand(200_000).contiguous()
    found = rounded(x).float()
    assert set(found.unique().tolist()) == {float(below), float(above)}
    share = float((found == float(above)).float().mean())
    exact = float((x[0] - below.float()) / gap)
    assert abs(share - exact) < 5 * math.sqrt(exact * (1 - exact) / x.numel())  # five standard deviations


def test_small_updates_arrive_on_average() -> None:
    """Steps of 1/5,000 of a weight, of which rounding to nearest would lose every one."""
    weights = torch.ones(2_000, dtype=torch.bfloat16)
    nearest = weights.clone()
    for step in range(500):
        weights = rounded(weights.float() * (1 - 2e-4), RoundingKey(0, step, "w"))
        nearest = (nearest.float() * (1 - 2e-4)).bfloat16()
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert abs(float(weights.float().mean()) - (1 - 2e-4) ** 500) < 2e-3


def test_bits_do_not_depend_on_cuts() -> None:
    x = torch.randn(5_000)
    whole = rounded(x)
    parts = [rounded(x[first:last], first=first) for first, last in ((0, 1), (1, 1_234), (1_234, 5_000))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("border", [2**31, 2**32, 2**33])
def test_bits_do_not_depend_on_cuts_near_ends_of_words(border: int) -> None:
    whole = random_words(KEY, border - 3, 6)
    assert torch.equal(whole, torch.cat([random_words(KEY, border - 3 + n, 1) for n in range(6)]))
    assert whole.unique().numel() == 6


def test_the_hash_is_the_one_described() -> None:
    """The bits are part of what a resumed run must find again."""
    key = derive_seed(KEY.seed, "stochastic rounding", KEY.step, KEY.name, 0)
    expected = []
    for number in range(100, 104):
        x = np.uint32(number) ^ np.uint32(key & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x = np.uint32((int(x) * 0x7FEB352D + ((key >> 31) & 0xFFFFFFFF)) % 2**32)
        x ^= x >> np.uint32(15)
        x = np.uint32(int(x) * 0x846CA68B % 2**32)
        x ^= x >> np.uint32(16)
        expected.append(int(x))
    assert [word % 2**32 for word in random_words(KEY, 100, 4).tolist()] == expected


def test_bits_of_steps_tensors_and_neighbours_are_unrelated() -> None:
    others = [RoundingKey(4, 7, KEY.name), RoundingKey(3, 8, KEY.name), RoundingKey(3, 7, "layers.1.weight")]
    count = 1 << 16
    words = random_words(KEY, 0, count)
    bits = torch.stack([(words >> place) & 1 for place in range(32)]).float()
    most = 5 / math.sqrt(count)  # five standard deviations of a correlation
    assert float((torch.corrcoef(bits) - torch.eye(32)).abs().max()) < most
    low = (words & 0xFFFF).double()
    streams = [(random_words(other, 0, count) & 0xFFFF).double() for other in others]
    streams += [low.roll(1), ((words >> 16) & 0xFFFF).double()]
    for stream in streams:
        assert abs(float(torch.corrcoef(torch.stack([low, stream]))[0, 1])) < most


def test_what_bf16_has_stays() -> None:
    kept = torch.tensor([0.0, -0.0, 1.5, -(2.0**100), math.inf, -math.inf, math.nan]).repeat(1_000)
    found = rounded(kept)
    assert torch.equal(found.isnan(), kept.isnan())
    assert torch.equal(found.nan_to_num(7.0).float(), kept.bfloat16().nan_to_num(7.0).float())
    assert torch.equal(torch.signbit(found[:2]), torch.signbit(kept[:2]))

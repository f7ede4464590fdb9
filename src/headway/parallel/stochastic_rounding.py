"""Stochastic rounding from fp32 to bf16, with random bits that are a function of where they are used.

A weight in bf16 has 8 significant bits: an update below 1/512 of it is lost if it is rounded to nearest, step after
step. Rounded up with a probability equal to the fraction that would be lost, it arrives on average (Gupta et al. 2015,
"Deep learning with limited numerical precision", section 3; Zamirai et al. 2020, "Revisiting BFloat16 training",
section 3).

The bits are a hash of (seed, step, name of the tensor, number of the element in the whole tensor). They depend neither
on how tensors are cut nor on the number of workers, and nothing has to be kept for a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.random import derive_seed

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Of the 32-bit mixing function `lowbias32` (Wellons 2018), whose bias is close to that of a random function."""
_WORD = 2**32
_KEPT = -(2**16)
"""Mask of the bits of an fp32 number that bf16 has."""


@dataclass(frozen=True)
class RoundingKey:
    """What the random bits of one tensor depend on, besides the number of the element."""

    seed: int
    step: int
    name: str
    """Name of the tensor in the state."""

    def words(self, high: int) -> tuple[int, int]:
        """Return 64 bits for the elements whose numbers have the upper 32 bits `high`, as two signed words."""
        key = derive_seed(self.seed, "stochastic rounding", self.step, self.name, high)
        return _signed(key), _signed(key >> 31)


def round_stochastically(x: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """Round each number to one of the two nearest bf16 numbers.

    A number between two neighbours becomes the upper one with the probability (number - lower) / (upper - lower), so
    the mean of the result is the number itself. Numbers that bf16 has, infinities and NaN stay as they are.

    Args:
        x: fp32, contiguous; it is overwritten.
        words: int32, of as many elements, from `random_words`: the lower 16 bits decide. They are overwritten.
        out: bf16, of as many elements, contiguous.
    """
    bits = x.view(-1).view(torch.int32)
    # Adding to the bits that are cut off carries into the last one that is kept as often as these bits say, and for
    # negative numbers too, since sign and size are apart.
    bits.add_(words.bitwise_and_(~_KEPT)).bitwise_and_(_KEPT)
    out.view(-1).copy_(x.view(-1))


def random_words(key: RoundingKey, first: int, count: int) -> torch.Tensor:
    """Return 32 random bits for each of neighbouring elements of a tensor, int32, (count,).

    Args:
        first: Number of the first element in the whole tensor, in row-major order.
    """
    high, low = divmod(first, _WORD)
    here = min(count, _WORD - low)
    if here < count:
        return torch.cat((random_words(key, first, here), random_words(key, first + here, count - here)))
    before, between = key.words(high)
    start = _signed(low)
    if start + count > 2**31:  # it runs from the largest to the smallest signed number
        x = torch.arange(low, low + count, dtype=torch.int64).to(torch.int32)
    else:
        x = torch.arange(start, start + count, dtype=torch.int32)
    # Neighbouring numbers become unrelated ones. The second half of the key comes between the products: with a sum
    # before them alone, one step's bits would be those of another one, only moved.
    x.bitwise_xor_(before)
    _fold(x, 16)
    x.mul_(_signed(_MULTIPLIERS[0])).add_(between)
    _fold(x, 15)
    x.mul_(_signed(_MULTIPLIERS[1]))
    _fold(x, 16)
    return x


def _fold(x: torch.Tensor, places: int) -> None:
    """Combine the bits with those `places` higher: `x ^= x >> places` of numbers without a sign."""
    shifted = x.bitwise_right_shift(places).bitwise_and_((1 << (32 - places)) - 1)
    x.bitwise_xor_(shifted)


def _signed(number: int) -> int:
    """Return the lowest 32 bits of a number as a signed one."""
    return (number + 2**31) % _WORD - 2**31

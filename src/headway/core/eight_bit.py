"""Block sizes of 8-bit values: values of a block share a scale. The optimizer and the memory planner both use them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 64
_FEWEST_VALUES = 4096


def block_size(shape: Sequence[int]) -> int | None:
    """Return how many values share a scale in the moments of a parameter of this shape.

    A block never crosses into the next row.

    Returns:
        None when the moments stay in fp32: there are few values, or no block that is large enough divides a row.
    """
    block = math.gcd(shape[-1], _LARGEST_BLOCK) if len(shape) > 1 else 1
    return block if block >= _SMALLEST_BLOCK and math.prod(shape) >= _FEWEST_VALUES else None

"""How values of 8 bits are cut into blocks that share a scale; both who keeps them and who plans memory ask here."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LARGEST_BLOCK, _SMALLEST_BLOCK, _FEWEST_VALUES = 256, 64, 4096


def block_size(shape: Sequence[int]) -> int | None:
    """Values that share a scale in the moments of a parameter; None when those stay in fp32: they are few, or a row is
    no whole number of blocks that are worth it. A block never goes on in the next row."""
    block = math.gcd(shape[-1], _LARGEST_BLOCK) if len(shape) > 1 else 1
    return block if block >= _SMALLEST_BLOCK and math.prod(shape) >= _FEWEST_VALUES else None

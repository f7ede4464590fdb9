"""The source of each row of a step, and how many rows each source gave before: computed, not stored.

The sources' shares lie side by side as intervals of [0, 1). The rows of step `s` are R points of that range,
(j + v(s)) / R for j = 0 ... R - 1, where v is the van der Corput sequence in base 2, the bits of `s` mirrored at the
point (van der Corput 1935; Niederreiter 1992, section 3.1). A row is taken from the source whose interval its point is
in. Since v takes every value m / 2^k + o, m = 0 ... 2^k - 1, once in each aligned window of 2^k steps, the points of
every such window, and of every single step, are equally spaced. An interval of the line that is w spacings long holds
floor(w) or ceil(w) of them: so in all these windows at once each source has its share of the rows to within one row.

Everything is exact: intervals and points are whole numbers, in units of 2^-40 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from headway.core.random import derive_seed
from headway.data.feeding.order import mix

#: Bits behind the point. A share is met to within 2^-41 rows a step, so to within one row in 2^40 steps.
FRACTION = 40

#: Rows of a step, at most, so that a point fits 63 bits.
MAX_ROWS = 2**22


def boundaries(shares: Sequence[Fraction], rows: int) -> tuple[int, ...]:
    """Return where the intervals of the sources begin, and where the last one ends.

    Args:
        shares: Share of each source, not negative, with the sum 1.
        rows: Rows of a step, R.

    Returns:
        Whole numbers of 2^-40 rows, one more than there are shares: from 0 to R * 2^40. An interval that is a whole
        number of rows long is exactly that long.
    """
    return tuple(round(bound * rows * 2**FRACTION) for bound in accumulate(shares, initial=Fraction(0)))


def counts_before(bounds: Sequence[int], step: int) -> list[int]:
    """Count the rows that steps 0 to `step` (exclusive) take from each source, in O(log step).

    [0, step) is cut into aligned windows of 2^k steps, one for each bit of `step` that is set; the points of a window
    below a bound follow from their spacing.
    """
    below = [0] * len(bounds)
    offset = 0
    for bit in reversed(range(step.bit_length())):
        if step >> bit & 1:
            gap = FRACTION - bit
            first = offset - (1 << gap) + 1  # so that the division below rounds up
            below = [total + (bound - first >> gap) for total, bound in zip(below, bounds, strict=True)]
            offset += 1 << (gap - 1)
    return [end - start for start, end in pairwise(below)]


def counts_between(bounds: Sequence[int], first: int, last: int) -> list[int]:
    """Count the rows that steps `first` to `last` (exclusive) take from each source."""
    ends = counts_before(bounds, last)
    starts = counts_before(bounds, first)
    return [end - start for end, start in zip(ends, starts, strict=True)]


def sources_of(bounds: Sequence[int], first: int, last: int, rows: int, seed: int) -> NDArray[np.intp]:
    """Return the source of every row of steps `first` to `last` (exclusive), in the order of the rows.

    Each step shuffles its points among its rows, seeded with `seed`. Without the shuffle, sources would take turns and
    a lane could have the same sources in every step. The shuffle changes no count.

    Returns:
        Numbers of sources, (last - first, rows).
    """
    steps = np.arange(first, last, dtype=np.uint64)
    keys = mix(steps + np.uint64(derive_seed(seed, "lattice")))
    # The mixer is a bijection, so all values of a step differ and sorting them gives one permutation.
    turns = np.argsort(mix(keys[:, None] ^ np.arange(rows, dtype=np.uint64)), axis=1)
    points = (turns << FRACTION) + _mirrored(steps)[:, None]
    return np.searchsorted(np.array(bounds[1:-1], dtype=np.int64), points, side="right")


def _mirrored(steps: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the van der Corput sequence in units of 2^-40, int64 of the shape of `steps`."""
    values = np.zeros(steps.shape, dtype=np.uint64)
    for bit in range(int(steps.max(initial=0)).bit_length()):
        values |= (steps >> np.uint64(bit) & np.uint64(1)) << np.uint64(FRACTION - 1 - bit)
    return values.astype(np.int64)

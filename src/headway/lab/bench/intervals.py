"""Sets of time intervals, as sorted lists of disjoint (start, end)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Stretches = list[tuple[float, float]]


def union(stretches: Iterable[tuple[float, float]]) -> Stretches:
    """Return the time within any of the intervals."""
    joined: Stretches = []
    for start, end in sorted(stretches):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def intersection(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> Stretches:
    """Return the time within both; each a union."""
    common = Stretches()
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if end > start:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def without(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> Stretches:
    """Return the time within the first and not in the second; each a union."""
    edges = [-math.inf, *(edge for stretch in second for edge in stretch), math.inf]
    return intersection(first, list(zip(edges[::2], edges[1::2], strict=True)))


def length(stretches: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in stretches)

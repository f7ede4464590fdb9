"""Statistics of measured values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Compute a quantile with linear interpolation between neighbours (type 7 of Hyndman & Fan 1996)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def perplexity(loss: float) -> float:
    """Compute exp of a mean loss in nats: infinity on overflow, NaN for NaN."""
    return math.inf if loss > 700 else math.exp(loss)


def covered(intervals: Sequence[tuple[float, float]], first: float, last: float) -> float:
    """Return how much of the range from `first` to `last` the intervals cover; of integers an integer."""
    total: float = 0
    reached = first
    for start, end in sorted(intervals):
        begin = max(start, reached)
        stop = min(end, last)
        total += max(0, stop - begin)
        reached = max(reached, stop)
    return total


def add_counts(total: object, part: object, names: Iterable[str]) -> None:
    """Add the counts of a part, attributes of these names, to those of the whole."""
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(part, name))

"""Statistics of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence


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

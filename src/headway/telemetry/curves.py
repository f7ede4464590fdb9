"""Curves as numbers, whatever draws them: smoothed, thinned out, and with labels for their axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import Batches

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

#: Points across a chart. A screen cannot show more.
POINTS = 1200


def smooth(values: Floats, half_window: int) -> Floats:
    """Return the centred moving average over up to `2 * half_window + 1` points, fewer at the ends. Shapes
    `(points,)`."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - half_window, 0)
    high = np.minimum(index + half_window + 1, len(values))
    means: Floats = (sums[high] - sums[low]) / (high - low)
    return means


def envelope(steps: Steps, values: Floats, buckets: int) -> tuple[Steps, Floats, Floats]:
    """Return the lowest and highest value in each of `buckets` groups of neighbouring points, so that no spike is lost.

    Needs at least one point per bucket. Returns the groups' middle steps, lows and highs, all of shape `(buckets,)`.
    """
    edges = np.linspace(0, len(values), buckets + 1).astype(np.int64)
    middles = steps[(edges[:-1] + edges[1:]) // 2]
    return middles, np.minimum.reduceat(values, edges[:-1]), np.maximum.reduceat(values, edges[:-1])


def thin(steps: Steps, values: Floats) -> tuple[Steps, Floats]:
    """Return at most `POINTS` of a smooth curve's points, including both ends."""
    if len(steps) <= POINTS:
        return steps, values
    chosen = np.linspace(0, len(steps) - 1, POINTS).astype(np.int64)
    return steps[chosen], values[chosen]


def half_window(points: int) -> int:
    """Return half of the smoothing window: one percent of the curve in total, zero for short curves."""
    return points // 200 if points >= 100 else (2 if points >= 40 else 0)


def short_number(value: float) -> str:
    """Format a single number: 20000 -> "20k", 1.5e9 -> "1.5B", 0.00025 -> "2.5e-4"."""
    for limit, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:g}{suffix}"
    if 0 < abs(value) < 1e-3:
        return _with_exponent(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _with_exponent(value: float) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10**exponent:.3g}e{exponent}"


def axis_labels(values: Sequence[float]) -> list[str]:
    """Format the labels of one axis consistently: "8k" next to "10k", "1e-3" next to "5e-4".

    All use the unit of the largest one, unless the axis spans so much that each needs its own.
    """
    largest = max(map(abs, values), default=0.0)
    # At zero, a locator may put a rounding error.
    clean = [value if abs(value) > 1e-12 * largest else 0.0 for value in values]
    smallest = min((abs(value) for value in clean if value), default=0.0)
    if 0 < smallest < 1e-3:
        return [_with_exponent(value) if 0 < abs(value) < 1 else short_number(value) for value in clean]
    if largest < 1e4:
        return [short_number(value) for value in clean]
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    scale, suffix = next(unit for unit in units if largest >= unit[0])
    if smallest >= max(1e3, 0.1 * scale):
        return [f"{value / scale:g}{suffix}" if value else "0" for value in clean]
    return [f"{value / 1e3:g}k" if 1e3 <= abs(value) < 1e4 else short_number(value) for value in clean]


def token_scale(batches: Batches) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions from steps to tokens and from tokens to steps.

    Both accept any numbers, in between and beyond the ends too, since axes have margins.
    """
    parts = batches.token_parts()
    steps = np.array([first for first, _ in parts], dtype=np.float64)
    tokens = np.array([batches.tokens_before(first) for first, _ in parts], dtype=np.float64)
    slopes = np.array([per_step for _, per_step in parts], dtype=np.float64)

    def line(x: Any, knots: Floats, values: Floats, slope: Floats) -> Any:
        part = np.maximum(np.searchsorted(knots, x, side="right") - 1, 0)
        return values[part] + (np.asarray(x) - knots[part]) * slope[part]

    return lambda x: line(x, steps, tokens, slopes), lambda x: line(x, tokens, steps, 1 / slopes)

"""One metric of one run as a curve that a page can draw: smoothed, cut to what is shown, and thinned out.

All of it is done here and not in the page: smoothing wants every point, and a page wants few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.core.arrays import Floats, Ints
from headway.telemetry.metrics import Metrics

Axis = Literal["step", "time", "tokens"]


@dataclass(frozen=True)
class Curve:
    """Points by rising position; each is a point of the run."""

    x: Floats
    """Step, seconds since the first record, or items so far."""
    steps: Ints
    values: Floats
    smooth: Floats
    """Exponential mean up to the point."""
    points: int
    """Number of points before thinning."""
    not_finite: int
    """Number of points among these that are NaN or infinite; they are not in the curve."""


def curve_of(
    metrics: Metrics,
    name: str,
    *,
    axis: Axis = "step",
    smoothing: float = 0.0,
    between: tuple[float, float] | None = None,
    limit: int = 1000,
) -> Curve:
    """Return the curve of a metric.

    Args:
        metrics: The history of the run.
        name: Name of the metric.
        axis: What the positions are.
        smoothing: Weight of the past in the exponential mean, from 0 to below 1.
        between: Positions that are shown; the curve goes one point beyond, so that lines reach the border.
        limit: Most points.
    """
    steps, values = metrics.series(name)
    x = _positions(metrics, steps, axis)
    finite = np.isfinite(values) & np.isfinite(x)
    inside = np.isfinite(x) if between is None else (x >= between[0]) & (x <= between[1])
    points = int(inside.sum())
    not_finite = int((inside & ~np.isfinite(values)).sum())
    x = x[finite]
    steps = steps[finite]
    values = values[finite]
    smooth = smoothed(values, smoothing)
    first = 0
    last = len(x)
    if between is not None:
        first = max(0, int(np.searchsorted(x, between[0], side="left")) - 1)
        last = int(np.searchsorted(x, between[1], side="right")) + 1
    shown = slice(first, last)
    x = x[shown]
    steps = steps[shown]
    values = values[shown]
    smooth = smooth[shown]
    kept = thinned(x, values, limit)
    return Curve(x[kept], steps[kept], values[kept], smooth[kept], points, not_finite)


def _positions(metrics: Metrics, steps: Ints, axis: Axis) -> Floats:
    """Return the position of each step; of none if the run does not record it."""
    if axis == "step":
        return steps.astype(np.float64)
    known, values = metrics.finite("time" if axis == "time" else "train/items")
    if not len(known):
        return np.full(len(steps), np.nan)
    # A clock may be set back, and records may come from elsewhere; positions rise.
    values = np.maximum.accumulate(values) - values[0] if axis == "time" else np.cumsum(np.maximum(values, 0.0))
    # A step without its own has the position of the one before.
    before = np.searchsorted(known, steps, side="right") - 1
    found = values[np.maximum(before, 0)]
    found[before < 0] = 0.0
    return np.asarray(found, dtype=np.float64)


def smoothed(values: Floats, weight: float) -> Floats:
    """Return the exponential mean up to each value, without the bias of its beginning (Kingma & Ba 2015, section 3)."""
    if weight <= 0.0:
        return values
    total = 0.0
    share = 0.0
    found = []
    for value in values.tolist():
        total = weight * total + (1.0 - weight) * value
        share = weight * share + (1.0 - weight)
        found.append(total / share)
    return np.array(found, dtype=np.float64)


def thinned(x: Floats, values: Floats, limit: int) -> Ints:
    """Return the indices of at most `limit` points: the least and the greatest of each of equally wide buckets.

    The first and the last point are among them. Extremes are kept, so a spike of one step is seen at every width.

    Args:
        x: Rising positions, (n,).
        values: Finite values, (n,).
        limit: At least 4.
    """
    if len(x) <= limit:
        return np.arange(len(x))
    buckets = (limit - 2) // 2
    span = (x[-1] - x[0]) or 1.0
    bucket = np.minimum(((x - x[0]) / span * buckets).astype(np.int64), buckets - 1)
    order = np.lexsort((values, bucket))
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    return np.unique(np.concatenate(([0], order[starts], order[ends], [len(x) - 1])))

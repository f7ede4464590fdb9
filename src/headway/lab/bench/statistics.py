"""Statistics of repeats: means with confidence intervals, and significant differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from headway.telemetry.student import TAIL, student_quantile


@dataclass(frozen=True)
class Mean:
    """A mean of repeats."""

    value: float
    half_width: float | None
    """Half of the 95 % confidence interval; None for a single repeat."""


@dataclass(frozen=True)
class Difference:
    """A comparison of two means."""

    ratio: float
    """The first mean divided by the second."""
    is_significant: bool
    """Whether the 95 % interval of their difference excludes zero."""
    is_known: bool = True
    """Whether both were measured more than once. If not, nothing is known, not even that they are equal."""


def mean_of(values: Sequence[float]) -> Mean | None:
    """Return the mean with its interval; None without values."""
    if not values:
        return None
    count = len(values)
    mean = statistics.fmean(values)
    if count == 1:
        return Mean(mean, None)
    return Mean(mean, student_quantile(TAIL, count - 1) * statistics.stdev(values) / math.sqrt(count))


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Compare two means by Welch's test (Welch 1947); None without values, or if the second mean is zero.

    With a single repeat on either side the spread is unknown, so no difference is significant.
    """
    if not first or not second or statistics.fmean(second) == 0:
        return None
    a = statistics.fmean(first)
    b = statistics.fmean(second)
    if min(len(first), len(second)) < 2:
        return Difference(a / b, is_significant=False, is_known=False)
    u = statistics.variance(first) / len(first)
    v = statistics.variance(second) / len(second)
    if u + v == 0:
        return Difference(a / b, a != b)
    degrees = (u + v) ** 2 / (u**2 / (len(first) - 1) + v**2 / (len(second) - 1))
    return Difference(a / b, abs(a - b) > student_quantile(TAIL, degrees) * math.sqrt(u + v))

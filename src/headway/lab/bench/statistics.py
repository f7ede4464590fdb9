"""Statistics of repeats: means with confidence intervals, and significant differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Student's t, two-sided 95 %, by degrees of freedom from 1 on. Beyond the table the value for 30 is used, which is
#: larger than the true one. (R: qt(0.975, 1:30).)
_T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


@dataclass(frozen=True)
class Mean:
    """A mean of repeats."""

    value: float
    half_width: float | None
    """Half of the 95 % confidence interval; None for a single repeat."""
    repeats: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval."""
        return None if self.half_width is None else (self.value - self.half_width, self.value + self.half_width)


@dataclass(frozen=True)
class Difference:
    """A comparison of two means."""

    ratio: float
    """The first mean divided by the second."""
    is_significant: bool
    """Whether the 95 % interval of their difference excludes zero."""
    is_known: bool = True
    """Whether both were measured more than once. If not, nothing is known, not even that they are equal."""


def t95(degrees: float) -> float:
    """Return Student's t, two-sided 95 %; fractional degrees of freedom are rounded down."""
    return _T95[min(max(1, math.floor(degrees)), len(_T95)) - 1]


def mean_of(values: Sequence[float]) -> Mean | None:
    """Return the mean with its interval; None without values."""
    if not values:
        return None
    count = len(values)
    mean = statistics.fmean(values)
    if count == 1:
        return Mean(mean, None, 1)
    return Mean(mean, t95(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


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
    return Difference(a / b, abs(a - b) > t95(degrees) * math.sqrt(u + v))

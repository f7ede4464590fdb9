"""What repeats can tell: means with confidence intervals, and whether two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Student's t, two-sided 95 %, by degrees of freedom from 1 on; beyond the table that of 30 is taken, which is more
#: than the true value. (R: qt(0.975, 1:30).)
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
    """Of the 95 % confidence interval; None of a single repeat."""
    repeats: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval."""
        return None if self.half_width is None else (self.value - self.half_width, self.value + self.half_width)


@dataclass(frozen=True)
class Difference:
    """Of two means."""

    ratio: float
    """The first by the second."""
    is_told: bool
    """The repeats can tell them apart: the 95 % interval of their difference leaves out zero."""
    is_known: bool = True
    """Both were measured more than once. If not, nothing can be told, not even that they are alike."""


def t95(degrees: float) -> float:
    """Student's t, two-sided 95 %; for broken degrees of freedom that of the whole number below."""
    return _T95[min(max(1, math.floor(degrees)), len(_T95)) - 1]


def mean_of(values: Sequence[float]) -> Mean | None:
    """The mean with its interval; None of nothing."""
    if not values:
        return None
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return Mean(mean, None, 1)
    return Mean(mean, t95(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Welch's test of two means (Welch 1947); None without values, or where the second mean is zero.

    With a single repeat on either side nothing is known of how much repeats differ, so nothing is told.
    """
    if not first or not second or statistics.fmean(second) == 0:
        return None
    a, b = statistics.fmean(first), statistics.fmean(second)
    if min(len(first), len(second)) < 2:
        return Difference(a / b, is_told=False, is_known=False)
    u, v = statistics.variance(first) / len(first), statistics.variance(second) / len(second)
    if u + v == 0:
        return Difference(a / b, a != b)
    degrees = (u + v) ** 2 / (u**2 / (len(first) - 1) + v**2 / (len(second) - 1))
    return Difference(a / b, abs(a - b) > t95(degrees) * math.sqrt(u + v))

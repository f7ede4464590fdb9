"""Student's t: tails and quantiles, for intervals of means."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np

#: One tail of a 95 % interval.
TAIL = 0.025
NORMAL = NormalDist()
#: Beyond so many degrees of freedom, Student's t is the normal distribution to four digits.
_MANY_DEGREES = 20_000


def student_tail(t: float, degrees: float) -> float:
    """Return the probability that Student's t is above `t`."""
    if t < 0:
        return 1.0 - student_tail(-t, degrees)
    if degrees > _MANY_DEGREES:
        return NORMAL.cdf(-t)
    # With t = sqrt(degrees) tan(angle), the density is that of cos(angle) ** (degrees - 1).
    angles = np.linspace(math.atan(t / math.sqrt(degrees)), math.pi / 2, 4001)
    heights = np.maximum(np.cos(angles), 0.0) ** (degrees - 1)
    sums = heights[0] + heights[-1] + 4 * heights[1::2].sum() + 2 * heights[2:-1:2].sum()
    area = float(angles[1] - angles[0]) / 3 * float(sums)  # Simpson's rule
    return min(0.5, area * math.sqrt(degrees) * _student_density(0.0, degrees))


def _student_density(t: float, degrees: float) -> float:
    logs = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(math.pi * degrees)
    return math.exp(logs - (degrees + 1) / 2 * math.log1p(t * t / degrees))


@cache
def student_quantile(tail: float, degrees: float) -> float:
    """Return the value above which Student's t is with a probability of at most a half."""
    if degrees > _MANY_DEGREES:
        return NORMAL.inv_cdf(1 - tail)
    value = 0.0
    step = math.inf
    # The tail is convex, so Newton's steps from the left never pass the solution.
    while step > 1e-10 * (1 + value):
        step = (student_tail(value, degrees) - tail) / _student_density(value, degrees)
        value += step
    return value

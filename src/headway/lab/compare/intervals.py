"""Intervals of paired differences: a studentized bootstrap by document, and Student's t where seeds vary too.

A document is the unit that varies, since its tokens depend on each other. A mean loss per token is a ratio of two sums
over documents, so both are resampled together (the ratio estimator: Cochran 1977, chapter 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.arrays import Floats
from headway.telemetry.student import NORMAL, TAIL, student_quantile, student_tail

#: With fewer documents a resample often repeats a single one, so the interval is Student's t.
FEWEST_TO_RESAMPLE = 8
#: Resamples, and draws beyond which fewer resamples are made.
RESAMPLES = 9_999
_LEAST_RESAMPLES = 999
_DRAWS = 50_000_000
#: Draws that are in memory at a time.
_DRAWS_AT_ONCE = 2_000_000
#: Quantiles for a two-sided test at the 5 % level that finds the difference in 80 % of all cases.
_POWER = NORMAL.inv_cdf(1 - TAIL) + NORMAL.inv_cdf(0.8)


@dataclass(frozen=True)
class Estimate:
    """A difference with its uncertainty."""

    effect: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    standard_error: float
    p_value: float
    """Two-sided, of no difference."""
    documents: int
    method: str
    """What was resampled or assumed, in words."""

    @property
    def detectable(self) -> float:
        """The smallest difference that these documents show in 80 % of all cases, at the 5 % level."""
        return _POWER * self.standard_error

    def documents_for(self, difference: float) -> int:
        """Return how many documents like these show a difference in 80 % of all cases, at the 5 % level.

        More documents do not make seeds vary less, so this is not asked where seeds are part of the error.
        """
        return max(2, math.ceil(self.documents * (self.detectable / difference) ** 2))


def ratio_interval(differences: Floats, sizes: Floats, seed: int, most_resamples: int = RESAMPLES) -> Estimate:
    """Estimate the ratio of two sums over documents, with the studentized bootstrap's interval (Efron 1981).

    Percentile and BCa intervals cover too little with 20 documents whose losses are skewed. So does the plain
    studentized one, by less. So the standard error is the jackknife's, the tails are widened for few documents
    (Hesterberg 2015, section 4.3), and no side is narrower than Student's t.

    Args:
        differences: Of the losses of two models, summed over each document: (documents,).
        sizes: What each document counts, such as its tokens or bytes: positive, (documents,).
        seed: Of the resamples.
        most_resamples: Resamples, unless the documents are so many that fewer are made.

    Raises:
        ValueError: there are fewer than two documents.
    """
    count = len(differences)
    effect, error = jackknife(differences, sizes)
    if error <= 1e-12 * abs(effect):
        certain = 1.0 if effect == 0 else 0.0
        return Estimate(effect, effect, effect, 0.0, certain, count, f"all {count:,} documents differ alike")
    if count < FEWEST_TO_RESAMPLE:
        return students_t(effect, error, count - 1, count, f"Student's t over {count} documents")
    resamples = min(most_resamples, max(_LEAST_RESAMPLES, _DRAWS // count))
    t = np.sort(_studentized(differences, sizes, resamples, seed))
    widening = math.sqrt(count / (count - 1))
    least = student_quantile(TAIL, count - 1)
    tail = NORMAL.cdf(-widening * least)
    low = effect - error * max(least, float(np.quantile(t, 1 - tail)))
    high = effect + error * max(least, -float(np.quantile(t, tail)))
    # The level at which an interval like this ends at zero.
    beyond = min(np.count_nonzero(t >= effect / error), np.count_nonzero(t <= effect / error))
    share = min(0.5, (int(beyond) + 1) / (resamples + 1))
    of_resamples = student_tail(-NORMAL.inv_cdf(share) / widening, count - 1)
    p_value = 2 * max(of_resamples, student_tail(abs(effect / error), count - 1))
    words = f"studentized bootstrap: {resamples:,} resamples of {count:,} documents"
    return Estimate(effect, low, high, error, min(1.0, p_value), count, words)


def seeds_interval(first: Floats, second: Floats, sizes: Floats) -> Estimate:
    """Estimate how much the mean of one group of runs differs from that of another, over seeds and documents.

    The variances of the documents and of each group's seeds add up, and Student's t has the degrees of freedom of
    Satterthwaite (1946). A group of one run is taken to vary as the other group does.

    Args:
        first: Losses of each run, summed over each document: (runs, documents).
        second: Of the other group.
        sizes: What each document counts: (documents,).

    Raises:
        ValueError: neither group has two runs, or there are fewer than two documents.
    """
    groups = (first, second)
    means = [group.sum(axis=1) / sizes.sum() for group in groups]
    effect, error = jackknife(second.mean(axis=0) - first.mean(axis=0), sizes)
    several = [mean for mean in means if len(mean) > 1]
    if not several:
        raise ValueError("one run each has no spread over seeds")
    parts = [(error**2, len(sizes) - 1)]
    for mean in means:
        known = mean if len(mean) > 1 else several[0]
        parts.append((float(np.var(known, ddof=1)) / len(mean), len(known) - 1))
    variance = sum(part for part, _ in parts)
    count = len(sizes)
    runs = " and ".join(str(len(mean)) for mean in means)
    words = f"Student's t over {runs} seeds and {count:,} documents"
    if variance <= (1e-12 * effect) ** 2:
        return Estimate(effect, effect, effect, 0.0, float(effect == 0), count, words)
    degrees = variance**2 / sum(part**2 / own for part, own in parts)
    if min(map(len, means)) == 1:
        words += "; the single run is taken to vary as the other group's seeds do"
    return students_t(effect, math.sqrt(variance), degrees, count, words)


def students_t(effect: float, error: float, degrees: float, count: int, words: str) -> Estimate:
    """Return the estimate of a value whose error is known with some degrees of freedom."""
    half = error * student_quantile(TAIL, degrees)
    p_value = min(1.0, 2 * student_tail(abs(effect / error), degrees))
    return Estimate(effect, effect - half, effect + half, error, p_value, count, words)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for being several (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def jackknife(differences: Floats, sizes: Floats) -> tuple[float, float]:
    """Return a ratio of sums over documents, and the jackknife's standard error of it, without its factor (n - 1) / n.

    Raises:
        ValueError: there are fewer than two documents.
    """
    if len(differences) < 2:
        raise ValueError("one document has no spread")
    total = float(sizes.sum())
    effect = float(differences.sum()) / total
    without = (differences - effect * sizes) / (total - sizes)
    return effect, float(np.sqrt(np.square(without).sum()))


def _studentized(differences: Floats, sizes: Floats, resamples: int, seed: int) -> Floats:
    """Return (ratio of a resample - ratio) / standard error of the resample, by resample."""
    count = len(differences)
    found = []
    products = (differences, sizes, differences**2, differences * sizes, sizes**2)
    values = np.stack(products, axis=1)
    effect = values[:, 0].sum() / values[:, 1].sum()
    random = np.random.Generator(np.random.PCG64(seed))
    at_once = max(1, _DRAWS_AT_ONCE // count)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn = random.integers(0, count, size=(rows, count), dtype=np.int64)
        drawn += np.arange(rows)[:, None] * count
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        d, n, dd, dn, nn = (times.astype(np.float64) @ values).T
        ratio = d / n
        squares = np.maximum(0.0, dd - 2 * ratio * dn + ratio**2 * nn) * count / (count - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append((ratio - effect) * n / np.sqrt(squares))
    t = np.concatenate(found)
    finite = np.isfinite(t)
    # A resample whose documents all differ alike, as with benchmarks of few items on which the models disagree.
    largest = np.abs(t[finite]).max(initial=0.0)
    clipped: Floats = np.nan_to_num(t, nan=0.0, posinf=largest, neginf=-largest)
    return clipped

"""A test for a difference of two proportions that may be looked at after every outcome.

The mixture sequential probability ratio test (Robbins 1970) in the form for two streams of Johari, Koomen, Pekelis and
Walsh: "Peeking at A/B Tests" (KDD 2017), and "Always Valid Inference: Continuous Monitoring of A/B Tests" (Operations
Research 70, 2022; arXiv:1512.04922), section 5. With the difference d of the proportions, the variance V of d without a
difference, and a normal prior of the difference with standard deviation tau,

    ratio = sqrt(V / (V + tau^2)) * exp(tau^2 d^2 / (2 V (V + tau^2))).

Without a difference the ratio ever exceeds 1 / alpha with a probability of at most alpha, however often it is looked at
(Ville's inequality). Here V comes from both arms' common proportion, as the hypothesis
has it, and the normal approximation is used only where an arm's share of outcomes has `LEAST` successes and failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Number = float | NDArray[Any]
#: Least variance of successes of the smaller arm for which a proportion counts as normal.
LEAST = 5.0


@dataclass(frozen=True)
class Counts:
    """The outcomes of an arm."""

    outcomes: int = 0
    successes: int = 0

    @property
    def rate(self) -> float | None:
        """The share of successes; None without outcomes."""
        return self.successes / self.outcomes if self.outcomes else None


@dataclass(frozen=True)
class SequentialTest:
    """How much evidence decides."""

    effect: float = 0.02
    """tau: a difference of proportions that matters. The test is the fastest for differences of about this size."""
    alpha: float = 0.05
    """The largest probability of a decision where there is no difference."""

    def log_ratio(self, successes: Number, outcomes: Number, other_successes: Number, other_outcomes: Number) -> Any:
        """Return the logarithm of the ratio for counts of two arms, numbers or arrays; 0 where there are too few."""
        total = np.maximum(np.add(outcomes, other_outcomes), 1)
        common = np.add(successes, other_successes) / total
        spread = common * (1 - common)
        size = np.maximum(outcomes, 1)
        other_size = np.maximum(other_outcomes, 1)
        enough = np.minimum(outcomes, other_outcomes) * spread >= LEAST
        variance = np.where(enough, spread * (1 / size + 1 / other_size), 1.0)
        prior = self.effect**2
        difference = np.divide(successes, size) - np.divide(other_successes, other_size)
        exponent = prior * difference**2 / (2 * variance * (variance + prior))
        return np.where(enough, 0.5 * np.log(variance / (variance + prior)) + exponent, 0.0)

    def evidence(self, one: Counts, other: Counts) -> float:
        """Return the ratio of two arms, at most 1e300."""
        ratio = float(self.log_ratio(one.successes, one.outcomes, other.successes, other.outcomes))
        return math.exp(min(ratio, 690.0))

    def worse(self, one: Counts, other: Counts) -> int | None:
        """Return which of two arms is worse: 0, 1, or None as long as that is not decided."""
        if self.evidence(one, other) < 1 / self.alpha:
            return None
        assert one.rate is not None and other.rate is not None
        return 0 if one.rate < other.rate else 1


def simulate(
    test: SequentialTest,
    rates: tuple[float, float],
    share: float,
    *,
    experiments: int,
    horizon: int,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Simulate experiments that are looked at after every outcome.

    Args:
        test: Decides.
        rates: Proportions of the two arms.
        share: Share of the first arm's requests.
        experiments: How many are simulated.
        horizon: Outcomes after which an experiment is given up.
        seed: Of the random numbers.

    Returns:
        The number of outcomes of each decision, (experiments,); `horizon` + 1 where there was none.
    """
    random = np.random.default_rng(seed)
    decided = np.full(experiments, horizon + 1, dtype=np.int64)
    open_ones = np.arange(experiments)
    counts = np.zeros((experiments, 4), dtype=np.int64)
    done = 0
    while done < horizon and len(open_ones):
        block = min(horizon - done, max(1, 2**21 // len(open_ones)), 4096)
        first = random.random((len(open_ones), block)) < share
        success = random.random(first.shape) < np.where(first, *rates)
        parts = (first & success, first, ~first & success, ~first)
        columns = [counts[open_ones, index, None] + part.cumsum(axis=1) for index, part in enumerate(parts)]
        hit = test.log_ratio(*columns) >= -math.log(test.alpha)
        is_hit = hit.any(axis=1)
        decided[open_ones[is_hit]] = done + 1 + hit[is_hit].argmax(axis=1)
        counts[open_ones] = np.stack([column[:, -1] for column in columns], axis=1)
        open_ones = open_ones[~is_hit]
        done += block
    return decided

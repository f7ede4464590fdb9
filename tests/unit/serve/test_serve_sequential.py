"""The test that may be looked at any time: its numbers, its false alarms, and how long it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.serve.experiment.planning import Assumed, plan
from headway.serve.experiment.sequential import Counts, SequentialTest, simulate
from headway.serve.experiment.split import Split

TEST = SequentialTest()
HALVES = Split(("prod", "candidate"), 0.5)


def integrated(one: Counts, other: Counts, tau: float) -> float:
    """The mixture ratio by numeric integration over the prior, from its definition."""
    assert one.rate is not None
    assert other.rate is not None
    common = (one.successes + other.successes) / (one.outcomes + other.outcomes)
    variance = common * (1 - common) * (1 / one.outcomes + 1 / other.outcomes)
    difference = one.rate - other.rate
    theta = np.linspace(-12 * tau, 12 * tau, 200_001)
    prior = np.exp(-(theta**2) / (2 * tau**2)) / (tau * math.sqrt(2 * math.pi))
    likelihood = np.exp((difference**2 - (difference - theta) ** 2) / (2 * variance))
    return float(np.trapezoid(likelihood * prior, theta))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Counts(1000, 300), Counts(1000, 340)),
        (Counts(9000, 180), Counts(1000, 35)),
        (Counts(500, 250), Counts(400, 200)),
    ],
)
def test_the_ratio_is_the_integral_over_the_prior(one: Counts, other: Counts) -> None:
    assert TEST.evidence(one, other) == pytest.approx(integrated(one, other, TEST.effect), rel=1e-6)
    assert TEST.evidence(one, other) == pytest.approx(TEST.evidence(other, one))


def test_arrays_and_numbers_give_the_same() -> None:
    many = TEST.log_ratio(np.array([300, 1]), np.array([1000, 2]), np.array([340, 0]), np.array([1000, 3]))
    assert many[0] == pytest.approx(math.log(TEST.evidence(Counts(1000, 300), Counts(1000, 340))))
    assert many[1] == 0.0


def test_too_few_outcomes_decide_nothing() -> None:
    """The normal approximation would call two successes of two against none of two proof."""
    assert TEST.evidence(Counts(), Counts()) == 1.0
    assert TEST.worse(Counts(8, 8), Counts(8, 0)) is None
    assert TEST.evidence(Counts(1000, 0), Counts(1000, 0)) == 1.0
    assert TEST.evidence(Counts(1000, 1000), Counts(1000, 1000)) == 1.0


def test_the_worse_arm_is_named() -> None:
    assert TEST.worse(Counts(1000, 300), Counts(1000, 450)) == 0
    assert TEST.worse(Counts(1000, 450), Counts(1000, 300)) == 1
    assert TEST.worse(Counts(1000, 300), Counts(1000, 310)) is None
    assert TEST.evidence(Counts(10**9, 0), Counts(10**9, 10**9)) <= 1e300


def test_simulated_decisions_are_those_of_one_outcome_after_the_other() -> None:
    """The vectorized simulation against the rule that the guard applies, drawn anew."""
    random = np.random.default_rng(4)
    times = []
    for _ in range(40):
        counts = [Counts(), Counts()]
        for number in range(1, 4001):
            arm = int(random.random() >= 0.5)
            success = random.random() < (0.3, 0.6)[arm]
            counts[arm] = Counts(counts[arm].outcomes + 1, counts[arm].successes + success)
            if TEST.worse(*counts) is not None:
                times.append(number)
                break
    found = simulate(TEST, (0.3, 0.6), 0.5, experiments=400, horizon=4000)
    assert len(times) == 40
    spread = found.std() / math.sqrt(len(times))
    assert abs(np.mean(times) - found.mean()) < 4 * spread


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_false_alarms_are_at_most_5_percent_of_1000_experiments(rate: float) -> None:
    """Looked at after each of 10,000 outcomes; a test for one look, looked at so often, would alarm in a third."""
    found = simulate(TEST, (rate, rate), 0.9, experiments=1000, horizon=10_000, seed=1)
    assert (found <= 10_000).mean() <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.02, 0.3])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_false_alarms_are_at_most_5_percent_of_1000_long_experiments(rate: float, share: float) -> None:
    found = simulate(TEST, (rate, rate), share, experiments=1000, horizon=100_000, seed=2)
    assert (found <= 100_000).mean() <= 0.05


def check_two_points(rate: float, split: Split, horizon: int = 200_000) -> None:
    """Experiments of other random numbers end within the interval that is printed beforehand, 9 of 10 of them."""
    printed = plan(split, TEST, Assumed(rate, 0.02, horizon, seed=0))
    found = simulate(TEST, (rate, rate + 0.02), split.share, experiments=200, horizon=horizon, seed=11)
    within = (found >= printed["outcomes"]["low"]) & (found <= printed["outcomes"]["high"])
    # 0.9 with a standard deviation of 0.021 for 200 experiments, and as much for the printed bounds.
    assert within.mean() == pytest.approx(0.9, abs=0.07)
    assert printed["decided"] > 0.95


def test_two_points_at_2_percent_are_found_within_the_printed_interval() -> None:
    check_two_points(0.02, HALVES, 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.02, 0.3])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_two_points_are_found_within_the_printed_interval(rate: float, share: float) -> None:
    check_two_points(rate, Split(("prod", "candidate"), share))

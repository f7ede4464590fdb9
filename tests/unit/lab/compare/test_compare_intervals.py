"""Intervals: coverage by simulation, and values by other means."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from headway.core.arrays import Floats
from headway.lab.compare.intervals import (
    RESAMPLES,
    Estimate,
    holm,
    jackknife,
    ratio_interval,
    seeds_interval,
)
from headway.telemetry.student import student_quantile, student_tail


def skewed_pair(random: np.random.Generator, documents: int) -> tuple[Floats, Floats, float]:
    """Documents of very different lengths, with losses whose mean per token and whose gap have a long right tail.

    Returns:
        Differences summed over each document, tokens, and the true difference per token.
    """
    tokens = np.maximum(8, np.round(np.exp(random.normal(5, 0.7, documents))))
    first = 3 * np.exp(random.normal(0, 0.5, documents) - 0.125)
    second = first * (1 + 0.02 * random.gamma(1, 1, documents))
    return tokens * (second - first), tokens, 0.06


def coverage(documents: int, pairs: int = 1000, resamples: int = RESAMPLES) -> float:
    random = np.random.default_rng(7)
    hits = 0
    for seed in range(pairs):
        differences, tokens, truth = skewed_pair(random, documents)
        found = ratio_interval(differences, tokens, seed, resamples)
        hits += found.low <= truth <= found.high
    return hits / pairs


def test_the_interval_covers_about_95_percent() -> None:
    """Of 250 pairs, so that chance alone moves it by 0.014."""
    assert 0.92 <= coverage(20, 250) <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "resamples"), [(20, RESAMPLES), (100, RESAMPLES), (2000, 1999)])
def test_the_interval_covers_93_to_97_percent(documents: int, resamples: int) -> None:
    found = coverage(documents, resamples=resamples)
    assert 0.93 <= found <= 0.97, found


def test_a_percentile_interval_would_not_cover() -> None:
    """The simulation tells a good interval from the one that is usual."""
    random = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        differences, tokens, truth = skewed_pair(random, 20)
        drawn = random.integers(0, 20, size=(999, 20))
        ratios = differences[drawn].sum(1) / tokens[drawn].sum(1)
        low, high = np.quantile(ratios, [0.025, 0.975])
        hits += low <= truth <= high
    assert hits / 300 < 0.92


def test_the_interval_is_near_that_of_scipy_with_many_documents() -> None:
    bootstrap = pytest.importorskip("scipy.stats").bootstrap
    differences, tokens, _ = skewed_pair(np.random.default_rng(5), 1000)
    found = ratio_interval(differences, tokens, 1)

    def ratio(d: Floats, n: Floats, axis: int = -1) -> Floats:
        result: Floats = d.sum(axis) / n.sum(axis)
        return result

    data = (differences, tokens)
    theirs = bootstrap(data, ratio, paired=True, n_resamples=1999, batch=200, method="BCa", rng=1)
    width = found.high - found.low
    assert abs(found.low - theirs.confidence_interval.low) < 0.08 * width
    assert abs(found.high - theirs.confidence_interval.high) < 0.08 * width
    assert found.standard_error == pytest.approx(theirs.standard_error, rel=0.06)


def test_with_equal_sizes_the_standard_error_is_that_of_a_mean() -> None:
    values = np.array([0.1, -0.2, 0.5, 0.3, 0.05, 0.4])
    effect, error = jackknife(values * 7, np.full(6, 7.0))
    assert effect == pytest.approx(values.mean())
    # The jackknife of a mean leaves out one of n: (n - 1)^-1/2 for n^-1/2.
    expected = math.sqrt(np.square(values - values.mean()).sum()) / (6 - 1)
    assert error == pytest.approx(expected)


def test_the_standard_error_of_a_ratio_leaves_each_document_out_once() -> None:
    differences, tokens, _ = skewed_pair(np.random.default_rng(2), 30)
    effect, error = jackknife(differences, tokens)
    left_out = [np.delete(differences, n).sum() / np.delete(tokens, n).sum() for n in range(30)]
    assert error == pytest.approx(math.sqrt(np.square(np.array(left_out) - effect).sum()))


def test_the_same_documents_give_the_same_interval() -> None:
    differences, tokens, _ = skewed_pair(np.random.default_rng(3), 50)
    assert ratio_interval(differences, tokens, 9) == ratio_interval(differences, tokens, 9)
    assert ratio_interval(differences, tokens, 9) != ratio_interval(differences, tokens, 10)


def test_documents_that_differ_alike_leave_no_doubt() -> None:
    tokens = np.array([5.0, 9.0, 30.0])
    assert ratio_interval(0.25 * tokens, tokens, 1).p_value == 0.0
    same = ratio_interval(0 * tokens, tokens, 1)
    assert (same.effect, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_one_document_is_refused() -> None:
    with pytest.raises(ValueError, match="one document"):
        ratio_interval(np.array([1.0]), np.array([2.0]), 1)


def test_few_items_on_which_models_disagree_give_a_finite_interval() -> None:
    """Many resamples of 3 among 1,000 hold none of them."""
    differences = np.zeros(1000)
    differences[:3] = 1.0
    found = ratio_interval(differences, np.ones(1000), 1)
    assert found.low < 0 < found.effect < found.high < 0.02 and 0.05 < found.p_value < 0.3


def test_the_p_value_is_the_level_of_the_interval_that_ends_at_zero() -> None:
    for seed in range(40):
        random = np.random.default_rng(seed)
        differences, tokens, truth = skewed_pair(random, 15)
        found = ratio_interval(differences - truth * tokens * random.uniform(0.3, 1.2), tokens, seed)
        excludes = found.low > 0 or found.high < 0
        assert excludes == (found.p_value < 0.05) or abs(found.p_value - 0.05) < 0.005


def test_students_t_has_the_values_of_its_tables() -> None:
    """R: qt(0.975, c(1, 2, 5, 30, 100)), and pt(2.5, c(1, 7, 100), lower.tail = FALSE)."""
    for degrees, value in ((1, 12.70620), (2, 4.302653), (5, 2.570582), (30, 2.042272), (100, 1.983972)):
        assert student_quantile(0.025, degrees) == pytest.approx(value, rel=1e-5)
    for degrees, tail in ((1, 0.1211190), (7, 0.02049), (100, 0.00702)):
        assert student_tail(2.5, degrees) == pytest.approx(tail, abs=2e-5)
    assert student_tail(-2.5, 7) == pytest.approx(1 - student_tail(2.5, 7))


def test_holm_corrects_in_steps() -> None:
    """R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_so_many_documents_show_the_difference_in_80_percent_of_all_cases() -> None:
    random = np.random.default_rng(4)
    pilot = ratio_interval(random.normal(0, 1, 4000), np.ones(4000), 1)
    needed = pilot.documents_for(0.25)
    assert needed == pytest.approx((1.959964 + 0.841621) ** 2 / 0.25**2, rel=0.06)
    shown = 0
    for _ in range(400):
        effect, error = jackknife(random.normal(0.25, 1, needed), np.ones(needed))
        shown += abs(effect / error) > student_quantile(0.025, needed - 1)
    assert 0.74 < shown / 400 < 0.86
    assert pilot.documents_for(pilot.detectable) == pytest.approx(4000, abs=1)


def test_seeds_count_as_well_as_documents() -> None:
    """Runs of one config that differ much by their seed are not told apart by many documents."""
    random = np.random.default_rng(1)
    tokens = np.round(np.exp(random.normal(5, 0.5, 200)))
    hits = narrow = 0
    for _ in range(400):
        of_document = random.normal(3, 0.6, 200)
        groups = []
        for gap in (0.0, 0.1):
            of_seed = random.normal(0, 0.08, (3, 1))
            groups.append(tokens * (of_document * (1 + gap / 3) + of_seed + random.normal(0, 0.05, (3, 200))))
        found = seeds_interval(groups[0], groups[1], tokens)
        hits += found.low <= 0.1 <= found.high
        alone = ratio_interval(groups[1][0] - groups[0][0], tokens, 1) if narrow < 1 else None
        narrow += alone is not None and alone.standard_error < 0.02
    assert 0.93 <= hits / 400 <= 0.995 and narrow == 1


def test_a_single_run_is_taken_to_vary_as_the_other_seeds_do() -> None:
    tokens = np.full(40, 10.0)
    documents = np.random.default_rng(1).normal(30, 1, 40)
    three = documents + np.array([[-1.0], [0.0], [1.0]])
    found = seeds_interval(three, documents[None] + 5, tokens)
    # All documents differ by 5 of 10 tokens; the means of seeds have a variance of 0.1 ** 2.
    assert found.effect == pytest.approx(0.5)
    assert found.standard_error == pytest.approx(0.1 * math.sqrt(1 / 3 + 1))
    assert "single run" in found.method
    with pytest.raises(ValueError, match="one run each"):
        seeds_interval(documents[None], documents[None], tokens)


def test_ten_thousand_documents_take_seconds() -> None:
    differences, tokens, _ = skewed_pair(np.random.default_rng(3), 10_000)
    began = time.process_time()
    found: Estimate = ratio_interval(differences, tokens, 1)
    assert found.documents == 10_000 and time.process_time() - began < 20

"""What losses say of a difference between models: effect, interval, power, non-inferiority, in all and by source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.arrays import Floats, Ints
from headway.core.errors import ConfigError, DataError
from headway.core.files.hashes import sha256_bytes
from headway.lab.compare.intervals import Estimate, holm, ratio_interval, seeds_interval

#: Documents that are compared on if no other number is asked for.
DOCUMENTS = 10_000
#: Level of the tests, two-sided.
SIGNIFICANT = 0.05
#: Relative differences for which documents are counted.
DIFFERENCES = (0.001, 0.002, 0.005, 0.01, 0.02)


@dataclass(frozen=True)
class Unit:
    """What losses are measured in."""

    name: str
    scale: float
    """Multiplies nats."""


NATS = Unit("nats per token", 1.0)
BITS = Unit("bits per byte", 1 / math.log(2))


@dataclass(frozen=True)
class Margin:
    """How much worse a model may be and still count as not inferior."""

    text: str
    amount: float
    is_relative: bool

    @classmethod
    def parse(cls, text: str) -> Margin:
        """Parse `1%` of the baseline's loss, or an amount in the unit of the losses.

        Raises:
            ConfigError: it is neither, or not positive.
        """
        is_relative = text.strip().endswith("%")
        try:
            amount = float(text.strip().removesuffix("%"))
        except ValueError:
            amount = math.nan
        if not (0 < amount < math.inf):
            raise ConfigError(
                "the margin is a positive share or amount",
                where=f"--margin {text}",
                fix="--margin 1%, of the baseline's loss; or --margin 0.02, in nats per token",
            )
        return cls(text.strip(), amount / 100 if is_relative else amount, is_relative)


@dataclass(frozen=True)
class Difference:
    """The loss of a model less that of the baseline, on the same documents."""

    model: str
    source: str | None
    """None for all documents."""
    baseline_loss: float
    loss: float
    absolute: Estimate
    relative: Estimate
    """As a share of the baseline's loss."""
    corrected_p_value: float
    """For the comparisons of its table (Holm 1979)."""
    over_seeds: bool

    @property
    def is_shown(self) -> bool:
        """Whether the difference is significant, corrected for the number of comparisons."""
        return self.corrected_p_value < SIGNIFICANT

    def is_non_inferior(self, margin: Margin) -> bool:
        """Return whether the whole interval is below the margin."""
        return (self.relative if margin.is_relative else self.absolute).high < margin.amount


@dataclass(frozen=True)
class ItemResults:
    """Results of one model on a task, by metric and by the item's number in the data set."""

    metrics: Mapping[str, Mapping[str, float]]
    higher_is_better: Mapping[str, bool]


@dataclass(frozen=True)
class ItemDifference:
    """The mean of a metric over a benchmark's items, less that of the baseline."""

    model: str
    task: str
    metric: str
    higher_is_better: bool
    baseline: float
    value: float
    estimate: Estimate
    corrected_p_value: float


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured on documents and items."""

    unit: Unit
    corpus: str
    """What the documents are."""
    documents: int
    tokens: int
    """Counted tokens of all documents, as the baseline reads them."""
    overall: Sequence[Difference] = ()
    by_source: Sequence[Difference] = ()
    items: Sequence[ItemDifference] = ()
    notes: Sequence[str] = ()
    """What a reader has to know of it: documents left out, what was not checked, what was resampled."""


def differences_of(
    losses: Mapping[str, Floats], sizes: Floats, sources: Sequence[str], source_of: Ints
) -> tuple[list[Difference], list[Difference]]:
    """Compare every model with the first one: over all documents, and by source where there are several.

    Args:
        losses: By model, in the wanted unit, of each of its runs summed over each document: (runs, documents).
        sizes: What each document counts: (documents,).
        sources: Names of the sources.
        source_of: Index of each document's source: (documents,).

    Raises:
        DataError: fewer than two documents count.
    """
    counts = sizes > 0
    if np.count_nonzero(counts) < 2:
        raise DataError(
            "one document says nothing of how much documents differ",
            where=f"{np.count_nonzero(counts)} of {len(sizes)} documents can be compared",
            fix="--data FILE or STORE with more documents; raise data.validation and prepare again; or --documents",
        )
    baseline, *others = losses
    overall = []
    by_source = []
    for model in others:
        overall.append(_difference(model, None, losses[baseline][:, counts], losses[model][:, counts], sizes[counts]))
        for index, source in enumerate(sources):
            own = counts & (source_of == index)
            if len(sources) > 1 and np.count_nonzero(own) > 1:
                pair = (losses[baseline][:, own], losses[model][:, own])
                by_source.append(_difference(model, source, *pair, sizes[own]))
    return _corrected(overall), _corrected(by_source)


def _difference(model: str, source: str | None, first: Floats, second: Floats, sizes: Floats) -> Difference:
    baseline = first.mean(axis=0)
    over_seeds = len(first) > 1 or len(second) > 1
    absolute, relative = (_estimate(first, second, of) for of in (sizes, baseline))
    own = float(second.mean(axis=0).sum() / sizes.sum())
    ours = float(baseline.sum() / sizes.sum())
    return Difference(model, source, ours, own, absolute, relative, absolute.p_value, over_seeds)


def _estimate(first: Floats, second: Floats, sizes: Floats) -> Estimate:
    if len(first) > 1 or len(second) > 1:
        return seeds_interval(first, second, sizes)
    return ratio_interval(second[0] - first[0], sizes, seed_of(first, second))


def _corrected(found: Sequence[Difference]) -> list[Difference]:
    corrected = holm([one.absolute.p_value for one in found])
    return [replace(one, corrected_p_value=p_value) for one, p_value in zip(found, corrected, strict=True)]


def item_differences(results: Mapping[str, Sequence[Mapping[str, ItemResults]]]) -> list[ItemDifference]:
    """Compare every model with the first one on the items of each task that all of their runs have.

    Args:
        results: By model, the results of each of its runs by task.
    """
    baseline, *others = results
    found = []
    for model in others:
        sides = (results[baseline], results[model])
        for task, of_task in results[baseline][0].items():
            for metric, better in of_task.higher_is_better.items():
                values = [[run[task].metrics.get(metric, {}) for run in side if task in run] for side in sides]
                common = set.intersection(*(set(run) for side in values for run in side))
                if len(common) < 2:
                    continue
                items = sorted(common)
                first, second = (np.array([[run[item] for item in items] for run in side]) for side in values)
                estimate = _estimate(first, second, np.ones(len(items)))
                means = (float(first.mean()), float(second.mean()))
                found.append(ItemDifference(model, task, metric, better, *means, estimate, estimate.p_value))
    corrected = holm([one.estimate.p_value for one in found])
    return [replace(one, corrected_p_value=p_value) for one, p_value in zip(found, corrected, strict=True)]


def seed_of(*losses: Floats) -> int:
    """Return a seed of resamples that only the losses decide."""
    content = b"".join(np.ascontiguousarray(part, dtype="<f8").tobytes() for part in losses)
    return int(sha256_bytes(content)[:16], 16)

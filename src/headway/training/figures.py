"""Named figures of a task besides its loss: the parts of the loss and metrics, exact over all workers.

A figure is made of counts that add up over micro-batches: of fp64 numbers, summed without rounding (`math.fsum`), so
neither the order nor the number of workers matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.errors import ConfigError

#: Rows of counts, one for each micro-batch.
Counts = list[list[float]]


@dataclass(frozen=True)
class Metric:
    """A metric of a task's own: counts that add up over micro-batches, and what follows from their sums.

    The F1 score, for example: `Metric(lambda outputs, batch: [hits, found, wanted], lambda s: 2 * s[0] / (s[1] +
    s[2]))`. Where a mean suffices, a function `(outputs, batch) -> values` does: the mean over all its elements counts.
    """

    counts: Callable[[Any, Any], Any]
    """(outputs, batch) -> numbers or a tensor, (k,), for a micro-batch; the outputs are the loss function's second
    value."""
    value: Callable[[Sequence[float]], float]
    """Sums of the counts over all micro-batches -> the metric; an error of arithmetic is NaN."""


def metric_of(given: Any) -> Metric:
    """Return the metric of a function that gives values to average, or the metric itself."""
    return given if isinstance(given, Metric) else Metric(lambda outputs, batch: _sum_and_number(given, outputs, batch),
                                                          lambda sums: sums[0] / sums[1])  # fmt: skip


def _sum_and_number(function: Callable[[Any, Any], Any], outputs: Any, batch: Any) -> torch.Tensor:
    values = torch.as_tensor(function(outputs, batch)).detach().double()
    return torch.stack([values.sum(), values.new_tensor(float(values.numel()))])


class Figures:
    """Collects the counts of passes, and turns the counts of all workers into figures.

    Args:
        metrics: By name.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)
        self._losses: tuple[str, ...] = ()
        self._sizes: dict[str, int] = {}
        self._kept: list[torch.Tensor] = []

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The whole names of the figures that an evaluation gives, as far as they are known."""
        losses = (f"evaluation/losses/{name}" for name in self._losses)
        return (*(f"evaluation/{name}" for name in self._metrics), *losses)

    def add(self, parts: Mapping[str, torch.Tensor], items: int, outputs: Any, batch: Any) -> None:
        """Add the counts of a micro-batch: the parts of its loss, means over its items; and in an evaluation those of
        metrics."""
        counts = []
        if parts:
            self._losses = tuple(parts)
            counts.append(torch.stack([part.detach().double() * items for part in parts.values()]))
            counts.append(counts[0].new_tensor([float(items)]))
        if not torch.is_grad_enabled():
            counts += [self._counts_of(name, metric, outputs, batch) for name, metric in self._metrics.items()]
        if counts:
            self._kept.append(torch.cat([one.to(counts[0].device) for one in counts]))

    def _counts_of(self, name: str, metric: Metric, outputs: Any, batch: Any) -> torch.Tensor:
        found = metric.counts(outputs, batch)
        if not isinstance(found, torch.Tensor):
            found = torch.stack([torch.as_tensor(one, dtype=torch.float64).detach().cpu() for one in found])
        flat = found.detach().double().flatten()
        if self._sizes.setdefault(name, len(flat)) != len(flat):
            raise ConfigError(
                f"the metric {name} has counted {len(flat)} numbers, and {self._sizes[name]} before",
                where=f"metrics of the task: {name}",
                fix="return equally many counts for every micro-batch; they are added up",
            )
        return flat

    def take(self) -> Counts:
        """Return the counts of all passes since the last call, (passes, k)."""
        kept = self._kept
        self._kept = []
        return torch.stack(kept).tolist() if kept else []

    def of_step(self, counts: Counts) -> dict[str, float]:
        """Return the figures of a training step from the counts of all workers."""
        return {f"train/losses/{name}": value for name, value in self._parts(counts).items()}

    def of_evaluation(self, counts: Counts) -> dict[str, float]:
        """Return the figures of an evaluation from the counts of all workers, by their whole names."""
        found = {f"evaluation/losses/{name}": value for name, value in self._parts(counts).items()}
        sums = _sums(counts)[len(self._losses) + bool(self._losses) :]
        for name, metric in self._metrics.items():
            own = sums[: self._sizes[name]]
            sums = sums[self._sizes[name] :]
            try:
                value = float(metric.value(own))
            except ArithmeticError:  # such as 0 / 0
                value = math.nan
            found[f"evaluation/{name}"] = value
        return found

    def _parts(self, counts: Counts) -> dict[str, float]:
        if not self._losses or not counts:
            return {}
        *parts, items = _sums(counts)[: len(self._losses) + 1]
        return {name: part / items for name, part in zip(self._losses, parts, strict=True)}


def _sums(counts: Counts) -> list[float]:
    columns = zip(*counts, strict=True)
    return [math.fsum(column) if all(map(math.isfinite, column)) else math.nan for column in columns]

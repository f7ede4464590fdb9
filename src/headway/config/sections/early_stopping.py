"""Early stopping: a run ends when its loss on held-out data, or another figure of its evaluations, gets no better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section
from headway.config.units import StepInterval
from headway.core.errors import ConfigError

#: In the context of a checkpoint: step and figure of every evaluation up to it; the figure is null if not finite.
EVALUATIONS = "evaluations"


class EarlyStoppingConfig(Section):
    """The end of training when the validation loss no longer falls; the state is saved, and the run is finished."""

    patience: PositiveInt
    """Evaluations in a row without a new best loss, after which training ends."""
    min_delta: Annotated[float, Field(ge=0.0)] = 0.0
    """By how much a loss must be below the best one to count as better."""
    metric: str = "evaluation/loss"
    """What counts in place of the loss: a metric of a task of your own, as `evaluation/accuracy`."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest (`min`) or the highest (`max`) is best."""


def early_stopping_problems(wanted: EarlyStoppingConfig | None, every: StepInterval | None) -> Iterator[ConfigError]:
    """Yield what early stopping lacks.

    Args:
        every: `evaluation.every`.
    """
    if wanted is not None and every is None:
        yield ConfigError(
            "early stopping goes by evaluations, and there are none before the end",
            where="train.early_stopping, evaluation.every",
            fix="evaluation.every='100 steps'",
        )


def evaluations_in(context: Mapping[str, Any], step: int) -> list[Any]:
    """Return the evaluations that the context of a checkpoint has, up to a step."""
    return [[at, loss] for at, loss in context.get(EVALUATIONS, ()) if at <= step]


def reason_to_stop(wanted: EarlyStoppingConfig | None, evaluations: Iterable[Sequence[Any]]) -> str | None:
    """Return why a run ends after these evaluations; None if it continues. A loss that is not finite is never better.

    Args:
        wanted: The config; None asks for no early stopping.
        evaluations: Step and figure, in the order of steps.
    """
    if wanted is None:
        return None
    sign = -1.0 if wanted.mode == "max" else 1.0
    best = math.inf
    at = 0
    since = 0
    for step, value in evaluations:
        if value is not None and sign * value < best - wanted.min_delta:
            best = sign * value
            at = step
            since = 0
        else:
            since += 1
        if since >= wanted.patience:
            side = "above" if wanted.mode == "max" else "below"
            better = f"{side} {sign * best:.4f} of step {at:,}" if at else "finite"
            by = f" by more than {wanted.min_delta:g}" if at and wanted.min_delta else ""
            what = "the validation loss" if wanted.metric == "evaluation/loss" else wanted.metric
            return f"{what} has not been {better}{by} in {since:,} evaluations"
    return None

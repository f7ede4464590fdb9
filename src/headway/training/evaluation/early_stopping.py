"""The evaluations by which a run ends early, kept with its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.sections.early_stopping import EVALUATIONS, EarlyStoppingConfig, evaluations_in, reason_to_stop
from headway.core.errors import ConfigError
from headway.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from headway.training.evaluation.evaluate import Evaluation


class EvaluationHistory:
    """The losses on held-out data of a run, or another figure of its evaluations, which every worker knows.

    They are in the context of every checkpoint, so that an attempt on another machine decides alike.

    Args:
        wanted: The config.
        context: Of the checkpoints of this attempt; its list of evaluations is kept here.
    """

    def __init__(self, wanted: EarlyStoppingConfig, context: dict[str, Any]) -> None:
        self._wanted = wanted
        self._context = context

    def add(self, step: int, result: Evaluation) -> None:
        """Add the evaluation of the current step.

        Raises:
            ConfigError: it does not give the metric that counts.
        """
        values = {"evaluation/loss": result.loss, **result.figures}
        name = self._wanted.metric
        if name not in values:
            raise ConfigError(
                f"early stopping goes by {name}, and an evaluation gives {', '.join(values)}",
                where="train.early_stopping.metric",
                fix=f"train.early_stopping.metric={next(reversed(values))}",
            )
        self._context[EVALUATIONS] = [*evaluations_in(self._context, step - 1), _entry(step, values[name])]

    def go_back(self, step: int) -> None:
        """Remove the evaluations after a step to which the run has gone back: they are of other weights."""
        self._context[EVALUATIONS] = evaluations_in(self._context, step)

    def has(self, step: int) -> bool:
        """Return whether a step has been evaluated."""
        return any(at == step for at, _ in evaluations_in(self._context, step))

    def reason_to_stop(self, step: int) -> str | None:
        """Return why the run ends after a step, if it does."""
        return reason_to_stop(self._wanted, evaluations_in(self._context, step))


def recorded_evaluations(
    context: Mapping[str, Any] | None, run: Path, step: int, metric: str = "evaluation/loss"
) -> list[Any]:
    """Return the evaluations up to a step: those of its checkpoint, or of the history if the checkpoint has none.

    A step that was saved without its evaluation is evaluated by the next attempt, so only the history has that one.
    """
    kept = None if context is None or EVALUATIONS not in context else evaluations_in(context, step)
    if kept and kept[-1][0] == step:
        return kept
    steps, losses = read_metrics(run).series(metric)
    history = [_entry(at, loss) for at, loss in zip(steps.tolist(), losses.tolist(), strict=True) if at <= step]
    return history if kept is None else [*kept, *(entry for entry in history if entry[0] == step)]


def _entry(step: int, loss: float) -> list[Any]:
    return [step, loss if math.isfinite(loss) else None]

"""The evaluations by which a run ends early, kept with its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.early_stopping import EVALUATIONS, EarlyStoppingConfig, evaluations_in, reason_to_stop
from headway.telemetry.metrics import read_metrics


class EvaluationHistory:
    """The losses on held-out text of a run, which every worker knows.

    They are in the context of every checkpoint, so that an attempt on another machine decides alike.

    Args:
        wanted: The config.
        context: Of the checkpoints of this attempt; its list of evaluations is kept here.
    """

    def __init__(self, wanted: EarlyStoppingConfig, context: dict[str, Any]) -> None:
        self._wanted, self._context = wanted, context

    def add(self, step: int, loss: float) -> None:
        """Add an evaluation; later ones are of steps that the run has gone back behind."""
        self._context[EVALUATIONS] = [
            *evaluations_in(self._context, step - 1),
            [step, loss if math.isfinite(loss) else None],
        ]

    def has(self, step: int) -> bool:
        """Return whether a step has been evaluated."""
        return any(at == step for at, _ in evaluations_in(self._context, step))

    def reason_to_stop(self, step: int) -> str | None:
        """Return why the run ends after a step, if it does."""
        return reason_to_stop(self._wanted, evaluations_in(self._context, step))


def recorded_evaluations(context: Mapping[str, Any] | None, run: Path, step: int) -> list[Any]:
    """Return the evaluations up to a step: those of its checkpoint, or of the history if the checkpoint has none."""
    if context is not None and EVALUATIONS in context:
        return evaluations_in(context, step)
    steps, losses = read_metrics(run).series("evaluation/loss")
    pairs = zip(steps.tolist(), losses.tolist(), strict=True)
    return [[at, loss if math.isfinite(loss) else None] for at, loss in pairs if at <= step]

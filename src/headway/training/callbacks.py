"""Hooks for whatever is not fetch, step, checkpoint or stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.training.evaluate import Evaluation

if TYPE_CHECKING:
    from headway.training.health import Decision
    from headway.training.loop import Job


class Callback:
    """Subclass and override what you need. Hooks run on every worker, in the order of the list, between steps.

    Steps are counted as finished ones: after the first update `step` is 1.
    """

    def on_start(self, job: Job) -> None:
        """Before the first step of an attempt; `job.state.cursor.step` is where it starts."""

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """After every step, with the metrics of the run directory's `metrics.jsonl`; more can be added here."""

    def on_evaluation(self, job: Job, step: int, result: Evaluation) -> None:
        """After an evaluation."""

    def before_save(self, job: Job) -> None:
        """Before the state is handed over to be saved, or copied into memory."""

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """After the state has been handed over to be saved, which took so long; training goes on meanwhile."""

    def on_hold(self, job: Job, step: int, stall_seconds: float) -> None:
        """After the state has been copied into memory (`checkpoint.memory_every`), which took so long."""

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """After a checkpoint has become visible, or could not be made: between steps, some after its own.

        The first worker is told of checkpoints, the others of their part.
        """

    def on_uploaded(self, job: Job, upload: Upload) -> None:
        """After a checkpoint has arrived at the remote tier, or could not be sent; on the first worker only."""

    def on_decision(self, job: Job, decision: Decision) -> None:
        """After a step that is not well, or whose update was left out, before what was decided about it is carried
        out."""

    def on_end(self, job: Job) -> None:
        """After the last step of an attempt, also when an error ends it."""

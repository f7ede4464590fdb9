"""Evaluations between steps: when one is due, and whether the run ends early by what they have found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from headway.checkpoint.store import CheckpointStore
from headway.core.console import notice
from headway.core.errors import CheckpointError
from headway.telemetry.metrics import read_metrics
from headway.training.ending import Ending, stopped
from headway.training.evaluation.evaluate import evaluate
from headway.training.job import Job
from headway.training.stop import StopSignals


class LoopEvaluation:
    """The evaluations of one attempt."""

    def __init__(self, job: Job, signals: StopSignals) -> None:
        self._job = job
        self._signals = signals

    def catch_up(self) -> None:
        """Evaluate the step that the attempt resumes from if it was saved without its evaluation.

        Raises:
            Preempted: a worker was asked to stop meanwhile.
        """
        if self._is_pending() and not self._evaluate():
            raise stopped(self._job, self._signals)

    def after_step(self, stop: bool) -> Ending | None:
        """Evaluate if that is due after the current step, and decide whether the loop ends with it.

        A machine that is taken away does not wait for an evaluation; the next attempt does it.

        Args:
            stop: Whether a worker was asked to stop.
        """
        job = self._job
        due = self._is_due()
        missed = due and (stop or not self._evaluate())
        last = job.state.cursor.step == job.total_steps or (due and self.ends_early())
        if missed or (stop and not last):
            return Ending(last, leaves=True)
        return Ending(last=True) if last else None

    def ends_early(self) -> bool:
        """Return whether the run ends after the current step by `train.early_stopping`, and report it."""
        job = self._job
        step = job.state.cursor.step
        reason = None if job.evaluations is None else job.evaluations.reason_to_stop(step)
        if reason is not None:
            notice(f"stopped early at step {step:,}: {reason}")
        return reason is not None

    def _evaluate(self) -> bool:
        """Evaluate, and return whether it finished.

        All workers leave when one is asked to stop; then no loss is reported.
        """
        job = self._job
        task = job.task
        step = job.state.cursor.step
        assert task.evaluation is not None
        with job.state.averaged():
            result = evaluate(
                task.evaluated or task.objective,
                job.state.model,
                task.evaluation,
                job.world,
                precision=job.config.train.precision,
                pipeline=job.assembled.pipeline,
                stopped=lambda: self._signals.stop,
            )
        if result is None:
            return False
        if job.evaluations is not None and result.items:
            job.evaluations.add(step, result)
        for callback in job.callbacks:
            callback.on_evaluation(job, step, result)
        return True

    def _is_due(self) -> bool:
        """Return whether an evaluation is due after the current step."""
        job = self._job
        is_last = job.state.cursor.step == job.total_steps
        return job.task.evaluation is not None and (is_last or job.due(job.config.evaluation.every))

    def _is_pending(self) -> bool:
        """Return whether the step that the attempt resumes from still lacks its evaluation.

        Only the first worker looks; all workers get its answer.
        """
        job = self._job
        step = job.state.cursor.step
        if not 0 < step <= job.total_steps or not self._is_due():
            return False
        if job.evaluations is not None:
            return not job.evaluations.has(step)
        pending = job.world.is_first and not was_evaluated(job.config.run_directory, step)
        return bool(job.world.broadcast_number(int(pending)))


def was_evaluated(run: Path, step: int) -> bool:
    """Look for the evaluation of a step in its checkpoint, which may come from elsewhere, then in the history."""
    with suppress(CheckpointError):
        metrics = CheckpointStore(run / "checkpoints").info(step).context.get("metrics")
        if isinstance(metrics, dict) and "evaluation/loss" in metrics:
            return True
    return step in read_metrics(run).series("evaluation/loss")[0].tolist()

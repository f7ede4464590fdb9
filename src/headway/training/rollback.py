"""Carrying out what was decided about a step: going on, going back, or giving up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from headway.core.console import warning
from headway.core.errors import CheckpointError, DivergedError
from headway.core.faults import fault_point
from headway.core.heartbeat import Phase, beat

if TYPE_CHECKING:
    from headway.data.feeding.prefetch import Prefetcher
    from headway.training.health import Decision
    from headway.training.loop import Job
    from headway.training.step import StepResult


class Rewinder(Protocol):
    """Brings a run back to an earlier checkpoint."""

    def target(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> int | None:
        """The newest checkpoint of `step` or before, the same on every worker; None when there is none left.

        Args:
            skipped_ranges: What is left out so far, and of a checkpoint to go back to.
        """
        ...

    def rewind(self, job: Job, to_step: int) -> None:
        """Load it, cursor included, and do away with checkpoints of steps that are left out from now on."""
        ...


def rolled_back(job: Job, feed: Prefetcher, result: StepResult) -> bool:
    """Tell callbacks of the decision on a step, if there is one, and carry it out.

    Returns:
        Whether the run went back, so that nothing else is to be done about this step.

    Raises:
        DivergedError: the decision is to stop; no checkpoint is written, and the last one is untouched.
    """
    decision = result.decision
    if decision is None:
        return False
    stopped = None
    if decision.action == "rollback":
        beat(Phase.CHECKPOINT)  # a write is waited for, and every byte of a checkpoint read
        decision, stopped = _planned(job, decision)
    elif decision.action == "stop":
        stopped = DivergedError(
            f"step {decision.step + 1:,}: {decision.reason}",
            where=str(job.config.run_directory),
            fix="see the steps before it; then lower optimizer.learning_rate, or let health.on_spike and"
            " health.on_nonfinite roll back",
        )
    said = {"warn": "", "skip": "; its update is left out", "stop": "", "rollback": _told(decision)}[decision.action]
    if job.world.is_first and not (stopped or decision.quiet):
        warning(f"step {decision.step + 1:,}: {decision.reason}{said}")
    for callback in job.callbacks:
        callback.on_decision(job, decision)
    if stopped:
        raise stopped
    if decision.to_step is None:
        return False
    fault_point("rollback", decision.step + 1)
    assert job.rewinder is not None
    beat(Phase.CHECKPOINT)
    job.state.skipped_ranges = (*job.state.skipped_ranges, (decision.first_step, decision.step + 1))
    job.rewinder.rewind(job, decision.to_step)
    feed.rewind(job.state.cursor.step)
    return True


def _told(decision: Decision) -> str:
    first, last = decision.first_step + 1, decision.step + 1
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"; going back to step {decision.to_step or 0:,}, and leaving out the rows of {steps}"


def _planned(job: Job, decision: Decision) -> tuple[Decision, DivergedError | None]:
    """The decision with the checkpoint to go back to; or to stop, and why."""
    limit, before = job.config.health.rollback_limit, len(job.state.skipped_ranges)
    where = f"step {decision.step + 1} of {job.config.run_directory}"
    if before >= limit:
        stop = replace(decision, action="stop", first_step=decision.step)
        what = f"{decision.reason}, after {before} rollbacks"
        fix = "lower optimizer.learning_rate or look at the data; health.rollback_limit allows more rollbacks"
        return stop, DivergedError(what, where=where, fix=fix)
    with suppress(CheckpointError):  # what could not be saved is none to go back to, and is told as ever
        job.writer.wait()
    for outcome in job.writer.outcomes():
        for callback in job.callbacks:
            callback.on_saved(job, outcome)
    # Before anybody knows of the decision: a state that is held may be made with the rows that it leaves out, and if
    # this worker died, it would be written and push out those to go back to.
    job.writer.release_snapshot()
    target = None if job.rewinder is None else job.rewinder.target(decision.first_step, job.state.skipped_ranges)
    if target is None:
        stop = replace(decision, action="stop", first_step=decision.step)
        what = f"{decision.reason}; no checkpoint from before step {decision.first_step + 1} is left to go back to"
        fix = "keep more (checkpoint.keep), or leave out fewer steps (health.leave_out_steps)"
        return stop, DivergedError(what, where=where, fix=fix)
    return replace(decision, to_step=target), None

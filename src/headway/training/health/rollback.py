"""Execution of the decision about a step: continue, roll back, or stop."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core.console import warning
from headway.core.coordination.heartbeat import Phase, beat
from headway.core.errors import CheckpointError, DivergedError
from headway.core.process.faults import fault_point
from headway.training.job import Job

if TYPE_CHECKING:
    from headway.data.feeding.prefetch import Prefetcher
    from headway.training.health.decisions import Decision
    from headway.training.step import StepResult


def roll_back(job: Job, feed: Prefetcher, result: StepResult) -> bool:
    """Report the decision on a step to callbacks, if there is one, and carry it out.

    Returns:
        Whether the run was rolled back, so that the loop has nothing else to do about this step.

    Raises:
        DivergedError: the decision is to stop; no checkpoint is written, and the last one is untouched.
    """
    decision = result.decision
    if decision is None:
        return False
    stopped = None
    if decision.action == "rollback":
        beat(Phase.CHECKPOINT)  # waits for a write, and reads a whole checkpoint
        decision, stopped = _plan_rollback(job, decision)
    elif decision.action == "stop":
        stopped = DivergedError(
            f"step {decision.step + 1:,}: {decision.reason}",
            where=str(job.config.run_directory),
            fix="see the steps before it; then lower optimizer.learning_rate, or let health.on_spike and"
            " health.on_nonfinite roll back",
        )
    consequences = {"skip": "; its update is left out", "rollback": _rollback_words(decision)}
    if job.world.is_first and not (stopped or decision.quiet):
        warning(f"step {decision.step + 1:,}: {decision.reason}{consequences.get(decision.action, '')}")
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
    if job.evaluations is not None:
        job.evaluations.go_back(job.state.cursor.step)
    feed.rewind(job.state.cursor.step)
    return True


def _rollback_words(decision: Decision) -> str:
    first = decision.first_step + 1
    last = decision.step + 1
    steps = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"; going back to step {decision.to_step or 0:,}, and leaving out the rows of {steps}"


def _plan_rollback(job: Job, decision: Decision) -> tuple[Decision, DivergedError | None]:
    """Complete the decision with the checkpoint to return to, or change it to stop, with the error that says why."""
    limit = job.config.health.rollback_limit
    before = len(job.state.skipped_ranges)
    where = f"step {decision.step + 1} of {job.config.run_directory}"
    if before >= limit:
        stop = replace(decision, action="stop", first_step=decision.step)
        what = f"{decision.reason}, after {before} rollbacks"
        fix = "lower optimizer.learning_rate or look at the data; health.rollback_limit allows more rollbacks"
        return stop, DivergedError(what, where=where, fix=fix)
    with suppress(CheckpointError):  # a failed save is reported below, and is no target
        job.writer.wait()
    for outcome in job.writer.outcomes():
        for callback in job.callbacks:
            callback.on_saved(job, outcome)
    # Before the decision is reported: a snapshot in memory may come from the rows that the decision leaves out. If this
    # worker died, the snapshot would be written, and would push out the checkpoints to return to.
    job.writer.release_snapshot()
    target = None if job.rewinder is None else job.rewinder.target(decision.first_step, job.state.skipped_ranges)
    if target is None:
        stop = replace(decision, action="stop", first_step=decision.step)
        what = f"{decision.reason}; no checkpoint from before step {decision.first_step + 1} is left to go back to"
        fix = "keep more (checkpoint.keep), or leave out fewer steps (health.leave_out_steps)"
        return stop, DivergedError(what, where=where, fix=fix)
    return replace(decision, to_step=target), None

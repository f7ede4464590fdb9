"""How the loop ends: the decision after a step, and the errors that say why before the last one."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import Cancelled, DivergedError, Preempted
from headway.cost.pricing import budget_reached
from headway.training.job import Job
from headway.training.stop import StopSignals


@dataclass(frozen=True)
class Ending:
    """The decision that the loop ends with the current step."""

    last: bool
    """Nothing is left to train: all steps are done, or the run stops early."""
    leaves: bool = False
    """The attempt ends before the run does: something is left to train, or to evaluate."""


def check_not_diverged(job: Job, resumed: bool = False) -> None:
    """Check that not too many steps in a row were skipped.

    Args:
        resumed: No step has been taken yet: an older version made the checkpoint, or the limit is lower than before.

    Raises:
        DivergedError: Too many were. The state is not saved, or the same command would continue past the limit.
    """
    skipped = job.state.cursor.skipped_in_row
    if skipped < job.config.train.skip_limit:
        return
    remedies = ["lower optimizer.learning_rate or lengthen schedule.warmup"]
    if job.config.parallel.reduce_precision == "fp16":
        remedies.append("or set parallel.reduce_precision to bf16, which overflows later")
    then = "the last checkpoint is intact"
    if resumed:
        then = "then go back to before these steps with `headway checkpoints restore`"
    raise DivergedError(
        f"{skipped} steps in a row had a loss or gradient that is not finite, or far above the usual",
        where=f"step {job.state.cursor.step} of {job.config.run_directory}",
        fix=f"{', '.join(remedies)}; {then}",
    )


def stopped(job: Job, signals: StopSignals) -> Preempted:
    """Return the error of an attempt that was asked to stop, once its state is saved."""
    step = job.state.cursor.step
    reason = "its budget" if signals.budget_reached else signals.reason()
    saved = f"; step {step} is saved" if step else " before the first step"
    what = f"stopped by {reason}{saved}"
    if signals.budget_reached:  # whoever ends the attempt adds what the run has spent by then
        return budget_reached(job.config.budget, job.config.run_directory, what)
    where = str(job.config.run_directory)
    if signals.is_cancelled:
        return Cancelled(what, where=where, fix="run the same command again if it is to continue after all")
    return Preempted(what, where=where, fix="run the same command again to continue from here")

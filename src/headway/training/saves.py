"""When the loop hands over the state to be saved, and what it waits for at the end."""

from __future__ import annotations

import math

from headway.checkpoint.save.outcomes import Outcome
from headway.core.coordination.heartbeat import Phase, beat
from headway.core.errors import CheckpointError
from headway.core.machine.allocator import give_back_freed_memory
from headway.parallel.strategy import SavedInPlace
from headway.training.failed_saves import FailedSaves
from headway.training.job import Job
from headway.training.save_schedule import SaveSchedule, saves_on_the_way

#: How often another process tries to write the last state of an attempt when one dies while writing it.
_RETRIES = 2
#: How long a save waits for the checks of opened shards; the last save of a run waits for all of them.
_DATA_CHECK_SECONDS = 5.0


class Saves:
    """The saves of one attempt."""

    def __init__(self, job: Job, failed: FailedSaves | None) -> None:
        self._job = job
        self._failed = failed
        self._schedule = SaveSchedule.of(job)
        self._saved_step = job.state.cursor.step
        self._has_room = False
        if isinstance(job.state.engine, SavedInPlace):
            job.state.engine.before_change(job.writer.settle)

    @property
    def due(self) -> bool:
        """Whether `checkpoint.every` is a time that has passed on this worker."""
        return self._schedule.due()

    @property
    def have_failed(self) -> bool:
        """Whether so many saves in a row have failed on this worker that the run must end."""
        return self._failed is not None and self._failed.too_many

    def save_first(self) -> None:
        """Save the state before the first step if the run may have to roll back to it."""
        if self._job.state.cursor.step == 0 and self._job.config.health.rolls_back:
            self._checkpoint()

    def check_failures(self, too_many: bool) -> None:
        """End the run if the workers agree that too many saves have failed; all of them call it.

        Raises:
            CheckpointError: They do. `SavesFailed` where another machine can continue the run.
        """
        if too_many and self._failed is not None:
            raise self._failed.end_of_run(self._job)

    def after_step(self, wanted: bool, last: bool) -> None:
        """Save the state after a step, or hold a copy of it, if that is due; then report what has come of saves.

        Args:
            wanted: Save it whatever is due.
            last: Save it as the last state of the run.
        """
        job = self._job
        settings = job.config.checkpoint
        if wanted or last or job.due(settings.every):
            if last:
                self._free_memory()
            with self._schedule.saving():
                self._checkpoint(last)
        elif settings.memory_every is not None and job.due(settings.memory_every):
            self._hold()
        elif not self._has_room and saves_on_the_way(job):  # moments exist from the first update on
            beat(Phase.CHECKPOINT)
            job.writer.get_ready(job.state.blocks())
        self._has_room = True
        for outcome in report_outcomes(job):
            self._schedule.written(outcome)

    def go_back(self) -> None:
        """Count the state to which the run has rolled back as the newest one that is saved."""
        self._saved_step = self._job.state.cursor.step

    def finish(self) -> None:
        """Save the newest state, unless it is saved, and wait until it is on disk.

        No later save would make up for it, so a retry follows when a process dies.

        Raises:
            CheckpointError: The state cannot be written. `SavesFailed` where another machine can continue the run.
        """
        job = self._job
        if job.state.cursor.step > self._saved_step:
            self._checkpoint()
        beat(Phase.END)
        for _ in range(_RETRIES):
            if not job.writer.wants_another_try():
                break
            report_outcomes(job)
            self._checkpoint()
            beat(Phase.END)
        try:
            job.writer.wait()
        except CheckpointError as error:
            if self._failed is None:
                raise
            raise self._failed.end_without(error) from error

    def _checkpoint(self, last: bool = False) -> None:
        """Hand over the state, which is written while training continues.

        After the last step, in a process that ends with it, the optimizer's part may be used up by the writer.
        """
        job = self._job
        state = job.state
        self._prepare(math.inf if last else _DATA_CHECK_SECONDS)
        blocks = state.blocks()
        spends = last and job.own_process and state.engine is None
        spent = {name for name in blocks if spends and name.startswith("optimizer.")}
        stall = job.writer.submit(state.cursor.step, blocks, state.cursor_record(), job.checkpoint_context, spent)
        self._saved_step = state.cursor.step
        for callback in job.callbacks:
            callback.on_checkpoint(job, state.cursor.step, stall)

    def _hold(self) -> None:
        """Keep a copy of the state in memory, to be written if this worker dies."""
        job = self._job
        state = job.state
        self._prepare(0.0)
        stall = job.writer.snapshot(state.cursor.step, state.blocks(), state.cursor_record(), job.checkpoint_context)
        for callback in job.callbacks:
            callback.on_hold(job, state.cursor.step, stall)

    def _prepare(self, seconds: float) -> None:
        """Make sure that no state trained on damaged data is saved, as far as that is known within so many seconds.

        Raises:
            DataError: The data are damaged.
        """
        job = self._job
        beat(Phase.CHECKPOINT)  # it may have to wait for an earlier write, too
        if job.task.settle_data is not None:
            job.task.settle_data(job.state.cursor.step, seconds, lambda: beat(Phase.CHECKPOINT))
        for callback in job.callbacks:
            callback.before_save(job)

    def _free_memory(self) -> None:
        """Free gradients and cached memory, so that the last copy of the state fits in their place."""
        state = self._job.state
        if state.engine is None:
            state.optimizer.zero_grad(set_to_none=True)
        give_back_freed_memory()


def report_outcomes(job: Job) -> list[Outcome]:
    """Report finished saves and uploads to callbacks; return the saves."""
    outcomes = list(job.writer.outcomes())
    for outcome in outcomes:
        for callback in job.callbacks:
            callback.on_saved(job, outcome)
    for upload in job.writer.uploads():
        for callback in job.callbacks:
            callback.on_uploaded(job, upload)
    return outcomes

"""The training loop's side of a save: training waits only until its state is copied to a staging buffer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headway.checkpoint.format.file_layout import Piece
from headway.checkpoint.format.folders import remove
from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.messages import HoldSnapshot, ReleaseSnapshot, RollBack, SaveJob, WriterSettings
from headway.checkpoint.save.outcomes import Outcome, Upload, WriterDied
from headway.checkpoint.save.outstanding_saves import OutstandingSaves
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.save_plan import SavePlan
from headway.checkpoint.save.staging import StagingBuffer
from headway.checkpoint.save.writer_client import WriterProcess
from headway.core.console import warning
from headway.core.coordination.heartbeat import Phase, beat, keep_beating
from headway.core.errors import CheckpointError
from headway.core.process.faults import fault_point
from headway.core.types import StateBlocks

#: How often a waiting worker checks the progress of the writer process.
_LOOK_SECONDS = 1.0
#: An uploader of an unfinished run exits by itself in less time than this, and machines grant more before they go.
_LEAVING_SECONDS = 25.0


class CheckpointWriter:
    """The writer of checkpoints: each worker copies its part of the state, and its writer process saves the copy.

    All workers submit together. The first worker learns the outcome of the whole save, the others that of their part.

        get_ready()   agrees on the plan, and waits until every worker has a free buffer
          |
        submit()      fills the buffer and sends a job: the save is outstanding (`OutstandingSaves`);
          |           what lies in the buffer itself (`Block.movable`) must not change before settle()
          |             '-- written, or failed ----------> outcomes()
        snapshot()    fills a buffer that is written only if this worker dies, until the next snapshot is complete
          |
        wait()        blocks until no save is outstanding
          |
        close()       ends the process once all is written, and uploaded unless a stop is urgent

    Args:
        settings: Destination of the checkpoints, and rank of this worker.
        gather: Exchanges a value with all workers and returns the values by rank.
    """

    def __init__(
        self, settings: WriterSettings, gather: Callable[[Any], Sequence[Any]] = lambda value: [value]
    ) -> None:
        self._settings = settings
        self._gather = gather
        self._buffers = tuple(StagingBuffer(settings.buffers_in) for _ in range(3 if settings.memory_snapshots else 2))
        self._saves = OutstandingSaves(settings, [buffer.descriptor for buffer in self._buffers])
        self._snapshots: list[tuple[StagingBuffer, WriterProcess]] = []
        self._plan = SavePlan()
        self._jobs_made = 0
        self._newest: SaveJob | None = None
        self._last_buffer: StagingBuffer | None = None
        self._is_unsettled = False

    def submit(
        self,
        step: int,
        blocks: StateBlocks,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        spent: Collection[str] = (),
    ) -> float:
        """Copy a state and queue the copy for writing; when this returns, the state may change again.

        Args:
            step: Finished steps.
            blocks: This worker's part of the state.
            cursor: Position of the run.
            context: Facts about the run and the attempt, as JSON values; the time is added.
            spent: Names of tensors that may be emptied to save memory. The state is then the run's last one, and a
                second call writes the same copy again.

        Returns:
            Seconds that training had to wait.

        Raises:
            CheckpointError: The format has no type for a tensor.
        """
        start = time.monotonic()
        if self._last_buffer is None:
            buffer = self.get_ready(blocks, ahead=not spent)
            self._discard_snapshot(buffer)
            buffer.fill(blocks, spent)
            self._last_buffer = buffer if spent else None
        else:
            buffer = self._last_buffer
        fault_point("checkpoint.stage")
        self._newest = self._make_job(step, buffer, cursor, context)
        self._saves.submit(self._newest, buffer)
        self._is_unsettled = self._settings.in_place
        return time.monotonic() - start

    def settle(self) -> None:
        """Wait until no save reads the state itself, so that it may change; all workers call this together."""
        if self._is_unsettled:
            self._wait_together()
            self._is_unsettled = False

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Copy a state that is written only if this worker dies; arguments and result are those of `submit`.

        The previous snapshot stays until this one is complete. All workers have completed theirs before any worker
        begins the next one, since no step finishes without all workers.
        """
        start = time.monotonic()
        buffer = self.get_ready(blocks)
        self._discard_snapshot(buffer)
        buffer.fill(blocks)
        fault_point("checkpoint.hold")
        job = self._make_job(step, buffer, cursor, context)
        process = self._saves.process_for_snapshot(step)
        if process is not None:
            self._snapshots = [(buffer, process), *self._snapshots[:1]]
            process.send(HoldSnapshot(job))
        return time.monotonic() - start

    def release_snapshot(self) -> None:
        """Discard the memory snapshots: they are not written when this worker dies."""
        for buffer in self._buffers:
            self._discard_snapshot(buffer)

    def note_rollback(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Report that the run rolled back: the next save follows `step`.

        Args:
            step: Step of the checkpoint that the run resumed from.
            skipped_ranges: Half-open ranges of steps whose rows are skipped from now on. Checkpoints that were trained
                on these rows are removed from the remote tier.
        """
        self._saves.note_rollback(RollBack(step, tuple(skipped_ranges)))

    def _make_job(
        self, step: int, buffer: StagingBuffer, cursor: Mapping[str, int], context: Mapping[str, Any]
    ) -> SaveJob:
        self._jobs_made += 1
        return SaveJob(
            number=self._jobs_made,
            step=step,
            tag=f"attempt-{context.get('attempt', os.getpid())}",
            descriptor=buffer.descriptor,
            pieces=tuple(self._plan.pieces),
            cursor={**cursor, "step": step},
            context={**context, "time": time.time()},
        )

    def _discard_snapshot(self, buffer: StagingBuffer) -> None:
        """Report that a buffer no longer holds a snapshot, before it is overwritten.

        Messages arrive in order, so the writer process knows this even if the worker dies in the middle of the copy.
        """
        for held, process in self._snapshots:
            if held is buffer:
                process.send(ReleaseSnapshot(buffer.descriptor))
        self._snapshots = [(held, process) for held, process in self._snapshots if held is not buffer]

    def get_ready(self, blocks: StateBlocks, ahead: bool = True) -> StagingBuffer:
        """Agree on the save plan and allocate a staging buffer; all workers call this together.

        A call some time before the first save makes that save as fast as the later ones.

        Args:
            blocks: This worker's part of the state.
            ahead: Whether to fault in all pages of the buffer now.
        """
        lacking = self._agree_on_plan(blocks)
        if self._settings.in_place:
            return self._move_in(blocks)
        if lacking:
            self._wait_for_buffers()
        buffer = self._free_buffer()
        assert buffer is not None, "only this thread takes buffers"
        buffer.prepare(self._plan.files, any(block.local.is_cuda for block in blocks.values()), ahead)
        return buffer

    def _move_in(self, blocks: StateBlocks) -> StagingBuffer:
        """Move the state to the buffer that it is written from, or to another one if its layout has changed."""
        self.settle()
        here, other, *others = self._buffers
        if not here.is_prepared_for(self._plan.files):
            self._buffers = (other, here, *others)
            other.prepare(self._plan.files, pinned=False, ahead=False)
            other.move_in(blocks)
            here.empty()
            return other
        here.move_in(blocks)
        return here

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of saves since the last call, in order of completion.

        Raises:
            Fenced: Another process owns the run now.
        """
        found = self._saves.take_outcomes()
        for outcome in found:
            if isinstance(outcome.error, Fenced):
                raise outcome.error
        return found

    def uploads(self) -> list[Upload]:
        """Return the outcomes of uploads since the last call; only the first worker has any."""
        return self._saves.take_uploads()

    def lost_upload(self) -> CheckpointError | None:
        """Return why another owner of the remote tier kept the newest checkpoint out of it.

        Call this after `close`, on the first worker.

        Returns:
            The error; None if there is no other owner, even if the store was unavailable.
        """
        return self._saves.tier_lost

    def wait(self) -> None:
        """Block until all submitted states are on disk; all workers call this together.

        Raises:
            CheckpointError: The newest checkpoint cannot be written.
        """
        self._wait_together()
        if self._saves.last_error is not None:
            raise self._saves.last_error

    def wants_another_try(self) -> bool:
        """Wait for all submitted states; all workers call this together.

        Returns:
            Whether a writer process died while it wrote the newest state, so that a new process may succeed.
        """
        self._wait_together()
        wanted = any(self._gather(isinstance(self._saves.last_error, WriterDied)))
        if wanted:
            # Otherwise the other workers would write into the folder of the failed save.
            if self._settings.rank == 0 and self._newest is not None:
                remove(Publisher(self._settings.directory).folder(self._newest.step, self._newest.tag))
            self._gather(None)
        return wanted

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Finish all submitted saves and release all resources; safe to call twice.

        Args:
            flush_snapshot: Write the newest memory snapshot, as if this worker had died. With several workers, this
                method does not wait for the write: all workers must end before their newest common step is known.
            hurried: Return whether the process was asked to stop. An upload that takes too long is then abandoned, and
                the next attempt repeats it.
        """
        finished: WriterProcess | None = None
        until = math.inf
        while self._saves.process is not finished:  # a successor may replace a dead process
            finished = self._saves.process
            finished.finish(tell_end=not flush_snapshot)
            if flush_snapshot and self._settings.workers > 1:
                break
            while not finished.ended:
                finished.join(_LOOK_SECONDS)
                finished.wake()
                self._saves.kill_if_stalled(flush_snapshot)
                is_uploading = not (self._saves.steps or flush_snapshot)
                if is_uploading:  # that may take long; the uploader has time limits of its own
                    beat(Phase.END)
                    until = min(until, time.monotonic() + _LEAVING_SECONDS if hurried() else math.inf)
                if time.monotonic() > until and not finished.ended:
                    warning("stop requested: the newest checkpoint is not uploaded; the same command uploads it")
                    finished.kill()
                    break
        for buffer in self._buffers:
            buffer.close()

    def _agree_on_plan(self, blocks: StateBlocks) -> bool:
        """Agree on which worker writes which pieces, if a worker's pieces changed since the last plan.

        Returns:
            Whether any worker lacks a free buffer.
        """
        mine = [Piece.of(name, block) for name, block in blocks.items()]
        lacks_buffer = self._free_buffer() is None
        changed, lacking = zip(*self._ask_all((mine != self._plan.mine, lacks_buffer)), strict=True)
        if any(changed):
            self._plan = SavePlan.agree(mine, self._gather, self._settings.rank, self._settings.max_shard_bytes)
        return any(lacking)

    def _wait_for_buffers(self) -> None:
        """Block until every worker has a free buffer.

        Workers ask each other while they wait: a save may have failed on the first worker only, and the others would
        wait for it without notice.
        """
        lacks_buffer = True
        while any(self._ask_all(lacks_buffer)):
            with self._saves.changed:
                lacks_buffer = not self._saves.changed.wait_for(self._free_buffer, _LOOK_SECONDS)
            self._saves.kill_if_stalled()

    def _ask_all(self, answer: Any) -> list[Any]:
        """Return the answers of all workers, and abandon saves that are over for the first worker."""
        everyone = self._gather([answer, self._saves.steps])
        self._saves.follow_first_worker(everyone[0][1])
        return [answer for answer, _ in everyone]

    def _wait_together(self) -> None:
        """Block until all submitted saves are over on every worker."""
        left = True
        heard_seconds = math.inf
        while left:
            with self._saves.changed:
                self._saves.changed.wait_for(lambda: not self._saves.steps, _LOOK_SECONDS)
            self._saves.kill_if_stalled()
            # A large state may take minutes. A single worker has no exchange with others that counts as a heartbeat.
            before = heard_seconds
            heard_seconds = self._saves.process.heard_seconds
            if heard_seconds > before:
                keep_beating()
            left = any(self._ask_all(bool(self._saves.steps)))

    def _free_buffer(self) -> StagingBuffer | None:
        """Return a buffer that is not being written from and does not hold the newest snapshot; None if all are in use.

        The first free buffer is preferred, since each further buffer costs as much memory as the state.
        """
        used = [*self._saves.buffers, *(buffer for buffer, _ in self._snapshots[:1])]
        return next((buffer for buffer in self._buffers if buffer not in used), None)

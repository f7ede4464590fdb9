"""The training loop's side of a save: training waits only until its state is copied to a staging buffer."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headway.checkpoint.format.file_layout import Piece
from headway.checkpoint.format.folders import remove
from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome, Upload, WriterDied
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.save_plan import SavePlan
from headway.checkpoint.save.staging import StagingBuffer
from headway.checkpoint.save.writer_client import WriterProcess, WriterSettings
from headway.core.console import warning
from headway.core.coordination.heartbeat import Phase, beat, keep_beating
from headway.core.errors import CheckpointError
from headway.core.format import format_seconds
from headway.core.process.faults import fault_point

if TYPE_CHECKING:
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
        submit()      fills the buffer and sends a job: the save is outstanding
          |             |-- written, or failed ----------> outcomes()
          |             '-- the process dies or hangs ---> this save fails; a successor gets those after it
        snapshot()    fills a buffer that is written only if this worker dies, until the next snapshot is complete
          |
        wait()        blocks until no save is outstanding
          |
        close()       ends the process once all is written, and uploaded unless a stop is urgent

    Answers of the process arrive on a thread of its client. `_changed` guards what both threads use.

    Args:
        settings: Destination of the checkpoints, and rank of this worker.
        gather: Exchanges a value with all workers and returns the values by rank.
    """

    def __init__(
        self, settings: WriterSettings, gather: Callable[[Any], Sequence[Any]] = lambda value: [value]
    ) -> None:
        self._settings, self._gather = settings, gather
        self._buffers = tuple(StagingBuffer() for _ in range(3 if settings.memory_snapshots else 2))
        self._snapshots: list[tuple[StagingBuffer, WriterProcess]] = []
        self._plan = SavePlan()
        self._outcomes: deque[Outcome] = deque()
        self._uploads: deque[Upload] = deque()
        self._lost: CheckpointError | None = None
        self._outstanding: dict[int, _PendingSave] = {}
        self._changed = threading.Condition(threading.RLock())
        self._last_error: CheckpointError | None = None
        self._newest: tuple[int, str] | None = None
        self._last_buffer: StagingBuffer | None = None
        self._jobs_made = 0
        self._undelivered: list[dict[str, Any]] = []
        self._rollback: dict[str, Any] | None = None
        self._process: WriterProcess | None = None
        self._ready_process()

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
        job = self._make_job("write", step, buffer, cursor, context)
        with self._changed:
            process = self._process_or_reason()
            if isinstance(process, str):  # training continues, and the next save tries again
                self._fail(job, process)
            else:
                if not self._outstanding:
                    process.heard_seconds = time.monotonic()
                self._outstanding[step] = _PendingSave(job, buffer, process)
        if not isinstance(process, str):
            process.send(job)
        self._newest = step, job["tag"]
        return time.monotonic() - start

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
        job = self._make_job("snapshot", step, buffer, cursor, context)
        with self._changed:
            process = self._process_or_reason()
            if isinstance(process, str):  # no save failed, so there is nothing to retry
                self._outcomes.append(
                    Outcome(step, error=self._died(f"{process} for a memory snapshot of step {step}"))
                )
            else:
                self._snapshots = [(buffer, process), *self._snapshots[:1]]
        if not isinstance(process, str):
            process.send(job)
        return time.monotonic() - start

    def release_snapshot(self) -> None:
        """Discard the memory snapshots: they are not written when this worker dies."""
        for buffer in self._buffers:
            self._discard_snapshot(buffer)

    def rolled_back(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Report that the run rolled back: the next save follows `step`.

        Args:
            step: Step of the checkpoint that the run resumed from.
            skipped_ranges: Half-open ranges of steps whose rows are skipped from now on. Checkpoints that were trained
                on these rows are removed from the remote tier.
        """
        with self._changed:
            self._rollback = {"kind": "roll back", "step": step, "left_out": [list(steps) for steps in skipped_ranges]}
            process = self._process_or_reason()
        if not isinstance(process, str):
            process.send(self._rollback)

    def _make_job(
        self, kind: str, step: int, buffer: StagingBuffer, cursor: Mapping[str, int], context: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._jobs_made += 1
        return {
            "kind": kind,
            "number": self._jobs_made,
            "step": step,
            "descriptor": buffer.descriptor,
            "pieces": [piece.record() for piece in self._plan.pieces],
            "cursor": {**cursor, "step": step},
            "context": {**context, "time": time.time()},
            "tag": f"attempt-{context.get('attempt', os.getpid())}",
        }

    def _discard_snapshot(self, buffer: StagingBuffer) -> None:
        """Report that a buffer no longer holds a snapshot, before it is overwritten.

        Messages arrive in order, so the writer process knows this even if the worker dies in the middle of the copy.
        """
        for held, process in self._snapshots:
            if held is buffer:
                process.send({"kind": "release", "descriptor": buffer.descriptor})
        self._snapshots = [(held, process) for held, process in self._snapshots if held is not buffer]

    def get_ready(self, blocks: StateBlocks, ahead: bool = True) -> StagingBuffer:
        """Agree on the save plan and allocate a staging buffer; all workers call this together.

        A call some time before the first save makes that save as fast as the later ones.

        Args:
            blocks: This worker's part of the state.
            ahead: Whether to fault in all pages of the buffer now.
        """
        if self._agree_on_plan(blocks):
            self._wait_for_buffers()
        with self._changed:  # an answer on another thread may remove a pending save meanwhile
            buffer = self._free_buffer()
        assert buffer is not None, "only this thread takes buffers"
        buffer.prepare(self._plan.files, any(block.local.is_cuda for block in blocks.values()), ahead)
        return buffer

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of saves since the last call, in order of completion.

        Raises:
            Fenced: Another process owns the run now.
        """
        with self._changed:
            self._kill_if_stalled()
        found = []
        while self._outcomes:
            found.append(self._outcomes.popleft())
        for outcome in found:
            if isinstance(outcome.error, Fenced):
                raise outcome.error
        return found

    def uploads(self) -> list[Upload]:
        """Return the outcomes of uploads since the last call; only the first worker has any."""
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def lost_upload(self) -> CheckpointError | None:
        """Return why another owner of the remote tier kept the newest checkpoint out of it.

        Call this after `close`, on the first worker.

        Returns:
            The error; None if there is no other owner, even if the store was unavailable.
        """
        return self._lost

    def wait(self) -> None:
        """Block until all submitted states are on disk; all workers call this together.

        Raises:
            CheckpointError: The newest checkpoint cannot be written.
        """
        self._wait_together()
        if self._last_error is not None:
            raise self._last_error

    def wants_another_try(self) -> bool:
        """Wait for all submitted states; all workers call this together.

        Returns:
            Whether a writer process died while it wrote the newest state, so that a new process may succeed.
        """
        self._wait_together()
        wanted = any(self._gather(isinstance(self._last_error, WriterDied)))
        if wanted:
            # Otherwise the other workers would write into the folder of the failed save.
            if self._settings.rank == 0 and self._newest is not None:
                remove(Publisher(self._settings.directory).folder(*self._newest))
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
        finished, until = None, math.inf
        while self._process is not finished and self._process is not None:  # a successor may replace a dead process
            finished = self._process
            finished.finish(tell_end=not flush_snapshot)
            if flush_snapshot and self._settings.workers > 1:
                break
            while not finished.ended:
                finished.join(_LOOK_SECONDS)
                finished.wake()
                with self._changed:
                    self._kill_if_stalled(flush_snapshot)
                    sends = not (self._outstanding or flush_snapshot)
                if sends:  # an upload may take long; the uploader has time limits of its own
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
        with self._changed:
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
            with self._changed:
                lacks_buffer = not self._changed.wait_for(self._free_buffer, _LOOK_SECONDS)
                self._kill_if_stalled()

    def _ask_all(self, answer: Any) -> list[Any]:
        """Return the answers of all workers, and abandon saves that are over for the first worker.

        If the first worker failed before it made a folder, the other writer processes would wait for that folder until
        their patience ends, and training would wait for them.
        """
        with self._changed:
            mine = sorted(self._outstanding)
        everyone = self._gather([answer, mine])
        with self._changed:
            for step in set(mine).difference(everyone[0][1]):
                if step in self._outstanding:
                    pending = self._outstanding[step]
                    pending.process.send({"kind": "abandon", "number": pending.job["number"]})
            # Otherwise the folder of a retry would be mistaken for that of the first try.
            self._undelivered = [job for job in self._undelivered if job["step"] in everyone[0][1]]
            if self._undelivered:
                self._process_or_reason()
        return [answer for answer, _ in everyone]

    def _wait_together(self) -> None:
        """Block until all submitted saves are over on every worker."""
        left, heard_seconds = True, math.inf
        while left:
            with self._changed:
                self._changed.wait_for(lambda: not self._outstanding, _LOOK_SECONDS)
                self._kill_if_stalled()
            # A large state may take minutes. A single worker has no exchange with others that counts as a heartbeat.
            process, before = self._process, heard_seconds
            heard_seconds = math.inf if process is None else process.heard_seconds
            if heard_seconds > before:
                keep_beating()
            left = any(self._ask_all(bool(self._outstanding)))

    def _free_buffer(self) -> StagingBuffer | None:
        """Return a buffer that is not being written from and does not hold the newest snapshot; None if all are in use.

        The first free buffer is preferred, since each further buffer costs as much memory as the state.
        """
        used = [pending.buffer for pending in self._outstanding.values()]
        used += [buffer for buffer, _ in self._snapshots[:1]]
        return next((buffer for buffer in self._buffers if buffer not in used), None)

    def _kill_if_stalled(self, flushing: bool = False) -> None:
        """Kill a writer process that makes no progress, so that a disk that hangs cannot block training.

        A new process takes the next state.

        Args:
            flushing: Whether the process may be writing a memory snapshot, which is not among the pending saves.
        """
        process = self._process
        if process is None or process.ended or not (self._outstanding or flushing):
            return
        seconds = time.monotonic() - process.heard_seconds
        if seconds > self._settings.stalled_seconds:
            process.kill()
            self._process_ended(
                process, f"the disk seems to hang (no progress for {format_seconds(seconds)})", hangs=True
            )

    def _ready_process(self) -> WriterProcess:
        """Return the writer process; start a new one if it has ended.

        Raises:
            OSError: No process can be started.
        """
        if self._process is None or self._process.ended:
            # Plug-ins of pydantic have nothing to do there; to look for them takes a fifth of the time to start.
            environment = {"PYDANTIC_DISABLE_PLUGINS": "__all__", **os.environ}
            if self._process is not None:  # an injected fault is for the first process, not for its successor
                environment.pop("HEADWAY_FAULTS", None)
            descriptors = [buffer.descriptor for buffer in self._buffers]
            self._process = WriterProcess(
                self._settings,
                descriptors,
                environment,
                on_complete=self._complete,
                on_upload=self._uploads.append,
                on_tier_lost=self._tier_lost,
                on_exit=self._process_ended,
            )
            if self._rollback is not None:  # the settings date from the start of the attempt
                self._process.send(self._rollback)
        while self._undelivered:
            self._process.send(self._undelivered.pop(0))
        return self._process

    def _process_or_reason(self) -> WriterProcess | str:
        """Return the writer process, or why there is none; training continues without it."""
        try:
            return self._ready_process()
        except OSError as error:
            return f"the process that writes checkpoints cannot be started ({error.strerror or error})"

    def _tier_lost(self, why: CheckpointError) -> None:
        self._lost = why

    def _complete(self, outcome: Outcome) -> None:
        """Record the outcome of a save."""
        with self._changed:
            self._outstanding.pop(outcome.step, None)  # a memory snapshot is not among them
            self._last_error = outcome.error
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def _process_ended(self, process: WriterProcess, how: str, hangs: bool = False) -> None:
        """Fail the save that an ended process was writing, and pass its other jobs to a successor.

        Args:
            process: The process that ended.
            how: How it ended, for the error message.
            hangs: Whether the disk hangs, so that training must not touch it.
        """
        with self._changed:
            if process.ended:  # this worker killed it, and has done the rest already
                return
            process.ended = True
            lost = sorted(step for step, pending in self._outstanding.items() if pending.process is process)
            for step in lost[:1]:
                self._fail(self._outstanding[step].job, how, hangs)
            for step in lost[1:]:
                pending, successor = self._outstanding[step], self._process_or_reason()
                if isinstance(successor, str):
                    self._fail(pending.job, f"{how}, and {successor}", hangs)
                else:
                    self._outstanding[step] = replace(pending, process=successor)
                    successor.send(pending.job)

    def _fail(self, job: Mapping[str, Any], how: str, hangs: bool = False) -> None:
        """Record that a save failed, since no process writes it."""
        what = f"{how} before step {job['step']} was saved"
        self._notify_other_writers(job, what, hangs)
        self._complete(Outcome(job["step"], error=self._died(what)))

    def _died(self, what: str) -> WriterDied:
        return WriterDied(what, where=str(self._settings.directory))

    def _notify_other_writers(self, job: Mapping[str, Any], why: str, hangs: bool) -> None:
        """Report a failed part to the writer processes that wait for it.

        The first worker's process waits for the part, or for a failure note. The others wait for the first worker's
        folder (see `WriterService`).
        """
        if self._settings.rank:
            known = {name: job[name] for name in ("step", "tag", "number")}
            self._undelivered.append({"kind": "fail", **known, "why": why})
            self._process_or_reason()  # the next process gets the message if none can be started now
        elif self._settings.workers > 1 and not hangs:
            with suppress(OSError):  # the folder exists already, or cannot be made
                Publisher(self._settings.directory).folder(job["step"], job["tag"]).mkdir(parents=True)


@dataclass(frozen=True)
class _PendingSave:
    """A save that is under way."""

    job: Mapping[str, Any]
    buffer: StagingBuffer
    process: WriterProcess

"""How the training loop hands over its state, so that it waits for a copy in memory and for nothing else."""

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

from headway.checkpoint.format.file_layout import Piece, ShardFile, plan_files
from headway.checkpoint.format.folders import remove
from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.outcomes import Outcome, Upload, WriterDied
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.save_plan import assign_writers
from headway.checkpoint.save.staging import StagingBuffer
from headway.checkpoint.save.writer_client import WriterProcess, WriterSettings
from headway.core.console import warning
from headway.core.errors import CheckpointError
from headway.core.faults import fault_point
from headway.core.format import format_seconds
from headway.core.heartbeat import Phase, beat, keep_beating

if TYPE_CHECKING:
    from headway.core.types import StateBlocks

#: How often it is looked whether a process that is waited for gets on.
_LOOK_SECONDS = 1.0
#: More than who sends takes to leave by itself, where the run is not finished, and less than machines give.
_LEAVING_SECONDS = 25.0


class CheckpointWriter:
    """Makes checkpoints of a state that several workers hold, each writing a part, in a process beside each worker.

    All workers submit together. What came of a save is known to the first worker; the others know of their part.

    Args:
        settings: Where to, and who this worker is.
        gather: Gives what every worker says, by rank.
    """

    def __init__(self, settings: WriterSettings, gather: Callable[[Any], Sequence[Any]] = lambda said: [said]) -> None:
        self._settings, self._gather = settings, gather
        self._buffers = tuple(StagingBuffer() for _ in range(3 if settings.memory_snapshots else 2))
        self._snapshots: list[tuple[StagingBuffer, WriterProcess]] = []
        self._mine: list[Piece] | None = None
        self._pieces: list[Piece] = []
        self._files: list[ShardFile] = []
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
        """Copy a state and job it to be written; when this returns, the state may change again.

        Args:
            step: Finished steps.
            blocks: What this worker has of the state.
            cursor: Where the run is.
            context: What the state belongs to, as JSON values; the time is added.
            spent: Names of tensors that are empty afterwards, where that saves memory. The state is the last one then:
                handed over again, it is what was copied.

        Returns:
            Seconds that training had to wait.

        Raises:
            CheckpointError: a tensor has no place in the format.
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
            if isinstance(process, str):  # training goes on, and the next save is tried again
                self._fail(step, job["tag"], process)
            else:
                if not self._outstanding:
                    process.heard_seconds = time.monotonic()
                self._outstanding[step] = _PendingSave(job, buffer, process)
        if not isinstance(process, str):
            process.send(job)
        self._newest = step, job["tag"]
        return time.monotonic() - start

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Copy a state, to be written only if this worker dies; arguments and result as `submit`.

        The state held before stays until this one is whole, and all workers have theirs by the time that the one
        after it begins: no step is finished without all of them.
        """
        start = time.monotonic()
        buffer = self.get_ready(blocks)
        self._discard_snapshot(buffer)
        buffer.fill(blocks)
        fault_point("checkpoint.hold")
        job = self._make_job("snapshot", step, buffer, cursor, context)
        with self._changed:
            process = self._process_or_reason()
            if isinstance(process, str):  # no save has failed, so nothing is to be tried again
                self._outcomes.append(Outcome(step, error=self._died(f"{process} to hold step {step}")))
            else:
                self._snapshots = [(buffer, process), *self._snapshots[:1]]
        if not isinstance(process, str):
            process.send(job)
        return time.monotonic() - start

    def release_snapshot(self) -> None:
        """Let go of the states that are held: no death has them written."""
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
            "pieces": [piece.record() for piece in self._pieces],
            "cursor": {**cursor, "step": step},
            "context": {**context, "time": time.time()},
            "tag": f"attempt-{context.get('attempt', os.getpid())}",
        }

    def _discard_snapshot(self, buffer: StagingBuffer) -> None:
        """Say that a buffer's content is no state any more, before it is overwritten: lines arrive in their job, so the
        process knows it even if this worker dies in the middle of the copy."""
        for held, process in self._snapshots:
            if held is buffer:
                process.send({"kind": "release", "descriptor": buffer.descriptor})
        self._snapshots = [(held, process) for held, process in self._snapshots if held is not buffer]

    def get_ready(self, blocks: StateBlocks, ahead: bool = True) -> StagingBuffer:
        """Agree on who writes what of a state, and make room for a copy of it; all workers together.

        The first save is as fast as the others if this was called some time before.

        Args:
            blocks: What this worker has of the state.
            ahead: Fetch all of the memory now.
        """
        if self._plan(blocks):
            self._wait_for_buffers()
        with self._changed:  # somebody else's answer takes an job away
            buffer = self._free_buffer()
        assert buffer is not None, "nothing else takes one"
        buffer.prepare(self._files, any(block.local.is_cuda for block in blocks.values()), ahead)
        return buffer

    def outcomes(self) -> list[Outcome]:
        """What came of saves since this was last asked, in their job.

        Raises:
            Fenced: the run belongs to somebody else now.
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
        """What came of uploads since this was last asked; the first worker's process has them."""
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def lost_upload(self) -> CheckpointError | None:
        """After `close`: why the newest checkpoint is not in the remote tier, where somebody else has that; None
        otherwise, also where the store merely could not be used. The first worker knows."""
        return self._lost

    def wait(self) -> None:
        """Return when all that was handed over is on disk. All workers together.

        Raises:
            CheckpointError: the newest checkpoint cannot be written.
        """
        self._wait_together()
        if self._last_error is not None:
            raise self._last_error

    def wants_another_try(self) -> bool:
        """Wait for all that was handed over; whether some worker's process died over the newest state, so that a new
        process may succeed. All workers together."""
        self._wait_together()
        wanted = any(self._gather(isinstance(self._last_error, WriterDied)))
        if wanted:
            if self._settings.rank == 0 and self._newest is not None:  # or others would write into the old folder
                remove(Publisher(self._settings.directory).folder(*self._newest))
            self._gather(None)
        return wanted

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Finish what was handed over and let go of all resources. Safe to call twice.

        Args:
            flush_snapshot: Write the newest memory snapshot, as if this worker had died. With several workers, this
                method does not wait for the write: all workers must end before their newest common step is known.
            hurried: Return whether the process was asked to stop. An upload that takes too long is then abandoned, and
                the next attempt repeats it.
        """
        finished, until = None, math.inf
        while self._process is not finished and self._process is not None:  # it may die and have a successor
            finished = self._process
            finished.finish(tell_end=not flush_snapshot)
            if flush_snapshot and self._settings.workers > 1:
                break
            while not finished.ended:
                finished.join(_LOOK_SECONDS)
                with self._changed:
                    self._kill_if_stalled(flush_snapshot)
                    sends = not (self._outstanding or flush_snapshot)
                if sends:  # what is saved may take long to be sent; who sends it has limits of its own
                    beat(Phase.END)
                    until = min(until, time.monotonic() + _LEAVING_SECONDS if hurried() else math.inf)
                if time.monotonic() > until and not finished.ended:
                    warning("told to stop: the newest checkpoint is not uploaded; the same command goes on with it")
                    finished.kill()
                    break
        for buffer in self._buffers:
            buffer.close()

    def _plan(self, blocks: StateBlocks) -> bool:
        """Agree on which worker writes which pieces, if a worker's pieces changed since the last plan.

        Returns:
            Whether any worker lacks a free buffer.
        """
        mine = [Piece.of(name, block) for name, block in blocks.items()]
        with self._changed:
            lacks_buffer = self._free_buffer() is None
        changed, lacking = zip(*self._ask_all((mine != self._mine, lacks_buffer)), strict=True)
        if any(changed):
            self._mine = mine
            everyone = self._gather([piece.record() for piece in mine])
            shares = assign_writers([[Piece.parse(record) for record in worker] for worker in everyone])
            self._pieces = shares[self._settings.rank]
            self._files = plan_files(self._pieces, self._settings.rank, self._settings.max_shard_bytes)
        return any(lacking)

    def _wait_for_buffers(self) -> None:
        """Return when every worker has a buffer. Together: what the others wait for may have failed for the first one,
        which nobody would tell them."""
        lacks_buffer = True
        while any(self._ask_all(lacks_buffer)):
            with self._changed:
                lacks_buffer = not self._changed.wait_for(self._free_buffer, _LOOK_SECONDS)
                self._kill_if_stalled()

    def _ask_all(self, said: Any) -> list[Any]:
        """What every worker says. Besides, parts of saves that are over for the first one are given up by the others:
        where it failed before it made a folder, their processes would wait for that as long as their patience lasts,
        and training in the end for them."""
        with self._changed:
            mine = sorted(self._outstanding)
        everyone = self._gather([said, mine])
        with self._changed:
            for step in set(mine).difference(everyone[0][1]):
                if step in self._outstanding:
                    pending = self._outstanding[step]
                    pending.process.send({"kind": "abandon", "number": pending.job["number"]})
            # Or the folder of another try would be taken for that of the first.
            self._undelivered = [job for job in self._undelivered if job["step"] in everyone[0][1]]
            if self._undelivered:
                self._process_or_reason()
        return [answer for answer, _ in everyone]

    def _wait_together(self) -> None:
        """Return when all that was handed over has come to its end on every worker."""
        left, heard_seconds = True, math.inf
        while left:
            with self._changed:
                self._changed.wait_for(lambda: not self._outstanding, _LOOK_SECONDS)
                self._kill_if_stalled()
            # A large state may take minutes, and where there are no others, no exchange with them is a sign of life.
            process, before = self._process, heard_seconds
            heard_seconds = math.inf if process is None else process.heard_seconds
            if heard_seconds > before:
                keep_beating()
            left = any(self._ask_all(bool(self._outstanding)))

    def _free_buffer(self) -> StagingBuffer | None:
        """One that nothing is written from, and that does not hold the newest state; further ones only if need be,
        since each costs as much memory again. None while there is none; only this thread takes one."""
        used = [pending.buffer for pending in self._outstanding.values()]
        used += [buffer for buffer, _ in self._snapshots[:1]]
        return next((buffer for buffer in self._buffers if buffer not in used), None)

    def _kill_if_stalled(self, flushing: bool = False) -> None:
        """A write that hangs must not hold up training: it is given up, and the next state is tried by another process.

        Args:
            flushing: The process may be writing what nobody has pending.
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
        """The process, or a new one when it is gone.

        Raises:
            OSError: none can be started.
        """
        if self._process is None or self._process.ended:
            environment = dict(os.environ)
            if self._process is not None:  # a fault that was pending for the first one is not for its successor
                environment.pop("HEADWAY_FAULTS", None)
            descriptors = [buffer.descriptor for buffer in self._buffers]
            self._process = WriterProcess(
                self._settings,
                descriptors,
                environment,
                self._complete,
                self._uploads.append,
                self._tier_lost,
                self._process_ended,
            )
            if self._rollback is not None:  # its settings are of the attempt's start
                self._process.send(self._rollback)
        while self._undelivered:
            self._process.send(self._undelivered.pop(0))
        return self._process

    def _process_or_reason(self) -> WriterProcess | str:
        """The same, or why there is none: training goes on without."""
        try:
            return self._ready_process()
        except OSError as error:
            return f"the process that writes checkpoints cannot be started ({error.strerror or error})"

    def _tier_lost(self, why: CheckpointError) -> None:
        self._lost = why

    def _complete(self, outcome: Outcome) -> None:
        """A save is over."""
        with self._changed:
            self._outstanding.pop(outcome.step, None)  # of a state that was held, there was no job
            self._last_error = outcome.error
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def _process_ended(self, process: WriterProcess, how: str, hangs: bool = False) -> None:
        """A process is gone, and with it what it was writing; what it had not begun is for its successor.

        Args:
            process: Which.
            how: In words.
            hangs: The disk does, so that training must not touch it.
        """
        with self._changed:
            if process.ended:  # it was given up
                return
            process.ended = True
            lost = sorted(step for step, pending in self._outstanding.items() if pending.process is process)
            for step in lost[:1]:
                self._fail(step, self._outstanding[step].job["tag"], how, hangs)
            for step in lost[1:]:
                pending, successor = self._outstanding[step], self._process_or_reason()
                if isinstance(successor, str):
                    self._fail(step, pending.job["tag"], f"{how}, and {successor}", hangs)
                else:
                    self._outstanding[step] = replace(pending, process=successor)
                    successor.send(pending.job)

    def _fail(self, step: int, tag: str, how: str, hangs: bool = False) -> None:
        """A save is over, since no process does it."""
        what = f"{how} before step {step} was saved"
        self._notify_other_writers(step, tag, what, hangs)
        self._complete(Outcome(step, error=self._died(what)))

    def _died(self, what: str) -> WriterDied:
        return WriterDied(what, where=str(self._settings.directory))

    def _notify_other_writers(self, step: int, tag: str, why: str, hangs: bool) -> None:
        """Their processes wait for what the dead one was to do, each in another way (see `WriterService`)."""
        if self._settings.rank:
            self._undelivered.append({"kind": "fail", "step": step, "tag": tag, "why": why})
            self._process_or_reason()  # if there is none, the next one is told
        elif self._settings.workers > 1 and not hangs:
            with suppress(OSError):  # it was made already, or nothing can be
                Publisher(self._settings.directory).folder(step, tag).mkdir(parents=True)


@dataclass(frozen=True)
class _PendingSave:
    """A save that is under way."""

    job: Mapping[str, Any]
    buffer: StagingBuffer
    process: WriterProcess

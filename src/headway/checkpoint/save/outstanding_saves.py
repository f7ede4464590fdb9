"""The saves of a worker that its writer process has not finished, and the outcomes of the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from headway.checkpoint.save.fence import Fenced
from headway.checkpoint.save.messages import (
    Abandon,
    Failed,
    FailPart,
    FromWriter,
    RollBack,
    Saved,
    SaveJob,
    TierLost,
    Write,
    WriterSettings,
)
from headway.checkpoint.save.outcomes import Outcome, Upload, WriterDied
from headway.checkpoint.save.publish import Publisher
from headway.checkpoint.save.staging import StagingBuffer
from headway.checkpoint.save.writer_client import WriterProcess, WriterSuccession
from headway.core.errors import CheckpointError
from headway.core.format import format_seconds


@dataclass(frozen=True)
class _OutstandingSave:
    job: SaveJob
    buffer: StagingBuffer
    process: WriterProcess


class OutstandingSaves:
    """Gives saves to the writer process, and keeps account of them.

        submit()  -->  outstanding --+-- the process answers ----------> take_outcomes()
                                     '-- it dies or hangs: this save fails, and a successor gets those after it

    Answers arrive on a thread of the process's handle. `changed` guards what both threads use.

    Args:
        settings: Settings of the process.
        descriptors: File descriptors of the staging buffers.

    Raises:
        OSError: No process can be started.
    """

    def __init__(self, settings: WriterSettings, descriptors: Sequence[int]) -> None:
        self._settings = settings
        self.changed = threading.Condition(threading.RLock())
        self._saves: dict[int, _OutstandingSave] = {}
        self._outcomes: deque[Outcome] = deque()
        self._uploads: deque[Upload] = deque()
        self.last_error: CheckpointError | None = None
        """Why the save that is over last has failed; None if it succeeded."""
        self.tier_lost: CheckpointError | None = None
        """Why another owner of the remote tier kept the newest checkpoint out of it."""
        self._writers = WriterSuccession(settings, descriptors, self._receive, self._process_ended)

    @property
    def process(self) -> WriterProcess:
        """The newest writer process, which may have ended."""
        return self._writers.newest

    @property
    def steps(self) -> list[int]:
        """The steps that are outstanding, in order."""
        with self.changed:
            return sorted(self._saves)

    @property
    def buffers(self) -> list[StagingBuffer]:
        """The buffers that the process writes from."""
        with self.changed:
            return [save.buffer for save in self._saves.values()]

    def submit(self, job: SaveJob, buffer: StagingBuffer) -> None:
        """Have a state written. Without a process for it, that save fails, and the next one tries again."""
        with self.changed:
            process = self._writers.process()
            if isinstance(process, str):
                self._fail(job, process)
                return
            if not self._saves:
                process.heard_seconds = time.monotonic()
            self._saves[job.step] = _OutstandingSave(job, buffer, process)
        process.send(Write(job))

    def process_for_snapshot(self, step: int) -> WriterProcess | None:
        """Return the process that gets a memory snapshot; without one, report it: there is no save to try again."""
        with self.changed:
            process = self._writers.process()
            if isinstance(process, str):
                self._outcomes.append(
                    Outcome(step, error=self._died(f"{process} for a memory snapshot of step {step}"))
                )
                return None
        return process

    def note_rollback(self, message: RollBack) -> None:
        """Tell the process that the run rolled back."""
        with self.changed:
            self._writers.roll_back(message)

    def take_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call, in order of completion."""
        self.kill_if_stalled()
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def take_uploads(self) -> list[Upload]:
        """Return the outcomes of uploads since the last call; only the first worker has any."""
        return [self._uploads.popleft() for _ in range(len(self._uploads))]

    def follow_first_worker(self, its_steps: Collection[int]) -> None:
        """Abandon the saves that are over for the first worker.

        If that failed before it made a folder, the other writer processes would wait for the folder until their
        patience ends, and training would wait for them.

        Args:
            its_steps: Steps that are outstanding there.
        """
        with self.changed:
            for step, save in self._saves.items():
                if step not in its_steps:
                    save.process.send(Abandon(save.job.number))
            self._writers.forget_failures(its_steps)

    def kill_if_stalled(self, flushing: bool = False) -> None:
        """Kill a writer process that makes no progress, so that a disk that hangs cannot block training.

        A new process takes the next state.

        Args:
            flushing: Whether the process may be writing a memory snapshot, which is not among the outstanding saves.
        """
        with self.changed:
            process = self.process
            seconds = time.monotonic() - process.heard_seconds
            is_busy = not process.ended and bool(self._saves or flushing)
            if is_busy and seconds > self._settings.stalled_seconds:
                process.kill()
                how = f"the disk seems to hang (no progress for {format_seconds(seconds)})"
                self._process_ended(process, how, hangs=True)

    def _receive(self, answer: FromWriter) -> None:
        match answer:
            case Saved(step, seconds, nbytes):
                self._complete(Outcome(step, seconds, nbytes))
            case Failed(step, is_fenced, what, where, fix):
                kind = Fenced if is_fenced else CheckpointError
                self._complete(Outcome(step, error=kind(what, where=where, fix=fix)))
            case Upload():
                self._uploads.append(answer)
            case TierLost(what, where, fix):
                self.tier_lost = CheckpointError(what, where=where, fix=fix)

    def _complete(self, outcome: Outcome) -> None:
        """Record the outcome of a save."""
        with self.changed:
            self._saves.pop(outcome.step, None)  # a memory snapshot is not among them
            self.last_error = outcome.error
            self._outcomes.append(outcome)
            self.changed.notify_all()

    def _process_ended(self, process: WriterProcess, how: str, hangs: bool = False) -> None:
        """Fail the save that an ended process was writing, and pass its other jobs to a successor.

        Args:
            process: The process that ended.
            how: How it ended, for the error message.
            hangs: Whether the disk hangs, so that training must not touch it.
        """
        with self.changed:
            if process.ended:  # this worker killed it, and has done the rest already
                return
            process.ended = True
            lost = [step for step in self.steps if self._saves[step].process is process]
            for step in lost[:1]:
                self._fail(self._saves[step].job, how, hangs)
            for step in lost[1:]:
                save = self._saves[step]
                successor = self._writers.process()
                if isinstance(successor, str):
                    self._fail(save.job, f"{how}, and {successor}", hangs)
                else:
                    self._saves[step] = replace(save, process=successor)
                    successor.send(Write(save.job))

    def _fail(self, job: SaveJob, how: str, hangs: bool = False) -> None:
        """Record that a save failed, since no process writes it."""
        what = f"{how} before step {job.step} was saved"
        # The first worker's writer process waits for the part, or for a failure note. The others wait for the first
        # worker's folder (see `WriterService`).
        if self._settings.rank:
            self._writers.fail_part(FailPart(job, what))
        elif self._settings.workers > 1 and not hangs:
            with suppress(OSError):  # the folder exists already, or cannot be made
                Publisher(self._settings.directory).folder(job.step, job.tag).mkdir(parents=True)
        self._complete(Outcome(job.step, error=self._died(what)))

    def _died(self, what: str) -> WriterDied:
        return WriterDied(what, where=str(self._settings.directory))

"""The writer process: each worker starts one by `python -m headway.checkpoint.save.writer_process`.

Messages arrive as JSON lines on standard input; states arrive in staging buffers, which both processes have open. The
process ends when its input ends, after it has finished all jobs: a worker that dies loses no state that it had
submitted. The process does not import PyTorch.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO

from headway.checkpoint.format.file_layout import ShardFile, plan_files
from headway.checkpoint.format.folders import TEMPORARY, pruning, remove
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.format.sealing import key_to_encrypt_with
from headway.checkpoint.format.signing import key_to_sign_with
from headway.checkpoint.post_save import CheckpointMaintainer
from headway.checkpoint.remote.files import SENT_AS
from headway.checkpoint.remote.relay import RelayedSave
from headway.checkpoint.save.fence import Fenced, OwnerUnknown
from headway.checkpoint.save.memory_snapshot import MemorySnapshots
from headway.checkpoint.save.messages import (
    FROM_WRITER,
    TO_WRITER,
    Abandon,
    End,
    Failed,
    FailPart,
    FromWriter,
    HoldSnapshot,
    Progress,
    Ready,
    ReleaseSnapshot,
    RollBack,
    Said,
    Saved,
    SaveJob,
    Start,
    TierLost,
    ToWriter,
    Write,
    WriterSettings,
)
from headway.checkpoint.save.outcomes import Upload
from headway.checkpoint.save.parts import CheckpointPart, failure_name, note_name, write_part
from headway.checkpoint.save.staging import StagedFiles, file_offsets
from headway.checkpoint.save.writer_locks import is_marked_lost, writer_has_ended, writer_is_here
from headway.checkpoint.store import CheckpointStore
from headway.core import console
from headway.core.errors import CheckpointError, HeadwayError, fix_for
from headway.core.files.atomic import write_json
from headway.core.files.foreign import LISTING_BYTES, read_json, read_text
from headway.core.files.paths import is_there
from headway.core.process.signals import STOP_SIGNALS

#: How often the first worker's process looks for the parts of the others.
_LOOK_SECONDS = 0.02
#: How often it asks the remote tier for the parts of other machines.
_ASK_SECONDS = 0.25
#: The least time between two progress messages to the worker.
_PROGRESS_SECONDS = 0.2
#: Once the worker is gone, how long to wait for a part that is not begun, or whose machine is lost, and for one that no
#: longer grows. There is no wait for processes that have ended.
_PATIENCE_ALONE_SECONDS = 5.0
_PATIENCE_BEGUN_SECONDS = 60.0


class Answers:
    """The stream of answers to the worker, which may be gone. Threads of the maintainer answer, too."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._progress_at = 0.0

    def send(self, answer: FromWriter) -> None:
        """Send an answer."""
        with suppress(BrokenPipeError), self._lock:
            self._stream.write(FROM_WRITER.encode(answer) + "\n")
            self._stream.flush()

    def report_progress(self) -> None:
        """Report progress, at most once per `_PROGRESS_SECONDS`."""
        now = time.monotonic()
        if now - self._progress_at >= _PROGRESS_SECONDS:
            self._progress_at = now
            self.send(Progress())


class WriterService:
    """The job loop of a writer process.

    Args:
        settings: Settings that hold for all saves.
        answers: Stream for answers to the worker.
        lock: File descriptor of this process's lock (`open_writer_lock`).
    """

    def __init__(self, settings: WriterSettings, answers: IO[str], lock: int | None = None) -> None:
        self._settings = settings
        self._lock = lock
        self.answers, self._worker = Answers(answers), os.getppid()
        is_first = settings.rank == 0
        self._after_save: CheckpointMaintainer | None = None
        if is_first and settings.after_save:
            self._after_save = CheckpointMaintainer(settings.after_save, self._tell_upload)
        self._store = CheckpointStore(
            settings.directory,
            settings.keep,
            self._may_write,
            after_save=self._after_save,
            sign_with=key_to_sign_with() if settings.sign and is_first else None,
        )
        self._key = key_to_encrypt_with("checkpoint.encrypt") if settings.encrypt else None
        self.abandoned: set[int] = set()
        """Numbers of jobs that are over for the first worker."""
        self._snapshots = MemorySnapshots(
            settings.directory,
            settings.rank,
            settings.workers,
            self._is_known_to_have_ended,
            settings.patience_seconds,
        )
        self._newest_saved = -1

    def _may_write(self) -> None:
        """Raise an error if this process no longer owns the run."""
        if self._settings.fence is not None:
            self._settings.fence.assert_held()

    @property
    def _run(self) -> Path | None:
        return None if self._settings.fence is None else self._settings.fence.run

    @property
    def _rank(self) -> int:
        return self._settings.rank

    def _has_ended(self, rank: int) -> bool:
        """Return whether another worker's writer process is known to have ended."""
        return self._run is not None and writer_has_ended(self._run, rank)

    def _is_known_to_have_ended(self, rank: int) -> bool | None:
        """Return whether another worker's writer process has ended; None if that cannot be known."""
        if self._run is None or not writer_is_here(self._run, rank):
            return None
        return writer_has_ended(self._run, rank)

    def _tell_upload(self, step: int, seconds: float | None) -> None:
        self.answers.send(Upload(step, seconds))

    def write(self, job: SaveJob) -> None:
        """Write this worker's part of a state; the first worker's process also collects all parts and publishes."""
        start = time.monotonic()
        files = plan_files(job.pieces, self._rank, self._settings.max_shard_bytes)
        nbytes = file_offsets(files)[-1]
        try:
            staged = StagedFiles(job.descriptor, files)
            manifest = None
            if self._rank == 0:
                manifest = self._publish(job, files, staged, nbytes)
            elif self._is_elsewhere(self._rank):
                self._send(job, files, staged)
            else:
                self._contribute(job, files, staged)
        except (HeadwayError, OSError) as error:
            self.answers.send(_failure(error, job.step))
            return
        if manifest:  # only the first worker's process knows whether the checkpoint was published
            self._newest_saved = job.step
            nbytes = manifest.total_bytes
        # The answer may cause a rollback to an older checkpoint, which pruning must not remove meanwhile.
        with pruning(self._store.directory) if manifest else nullcontext():
            self.answers.send(Saved(job.step, time.monotonic() - start, nbytes))
            if manifest:
                self._store.after_save(manifest)

    def _publish(self, job: SaveJob, files: list[ShardFile], staged: StagedFiles, nbytes: int) -> Manifest:
        save = None
        if self._settings.relay is not None:
            save = RelayedSave(self._settings.relay, job.step, job.number)
            save.begin()
        with self._store.saving(job.step, job.tag, nbytes) as folder:
            mine = write_part(folder, files, staged, self.answers.report_progress, self._key)
            parts = [mine, *(self._part_of(folder, rank, save) for rank in range(1, self._settings.workers))]
            more = self._after_save.context(job.step, folder) if self._after_save else {}
            context = {**job.context, **more}
            if save is not None:
                context[SENT_AS] = save.digits
            return self._store.publisher.finish(folder, parts, job.cursor, context, self.answers.report_progress)

    def handle(self, message: ToWriter) -> bool:
        """Carry out a message from the worker, and return whether more may follow."""
        match message:
            case Write(job):
                self.write(job)
            case FailPart(job, why):
                self._fail(job, why)
            case HoldSnapshot(job):
                self._snapshots.add(job)
            case ReleaseSnapshot(descriptor):
                self._snapshots.release_snapshot(descriptor)
            case RollBack(step, skipped_ranges):
                self._newest_saved = min(self._newest_saved, step)
                if self._after_save is not None:
                    self._after_save.note_rollback(step, skipped_ranges)
        return not isinstance(message, End)

    def flush_snapshot(self) -> None:
        """Write the newest memory snapshot: the worker is gone without an orderly end."""
        self._snapshots.flush_snapshot(self._newest_saved, self.write)

    def close(self) -> None:
        """Finish uploads and other work after saves.

        The lock is released first: no process needs to wait for this work, since all states are saved.
        """
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._after_save is not None:
            self._after_save.close()
            lost = self._after_save.lost
            if lost is not None:
                self.answers.send(TierLost(lost.what, lost.where, lost.fix))

    def _contribute(self, job: SaveJob, files: list[ShardFile], staged: StagedFiles) -> None:
        """Write this worker's part into the first worker's folder, and leave a note of the files."""
        folder = self._store.publisher.folder(job.step, job.tag)
        self._wait_for(folder, 0, "the first worker's folder did not come", job=job)
        try:
            self._may_write()
            part = write_part(folder, files, staged, self.answers.report_progress, self._key)
            write_json(folder / note_name(self._rank), part.record(), exact=True)
        except (HeadwayError, OSError) as error:
            with suppress(OSError):
                leave_failure(folder, self._rank, str(error))
            raise

    def _is_elsewhere(self, rank: int) -> bool:
        """Return whether a worker's part comes from another machine than the first worker's, by the remote tier."""
        relay = self._settings.relay
        return relay is not None and rank >= relay.first_rank

    def _send(self, job: SaveJob, files: list[ShardFile], staged: StagedFiles) -> None:
        """Write this worker's part on this machine's own disk, and send it to the remote tier."""
        assert self._settings.relay is not None, "this worker is elsewhere"
        save = RelayedSave(self._settings.relay, job.step, job.number)
        for old in self._store.directory.glob(f"{TEMPORARY}*-{self._rank}"):  # of a process that was killed
            remove(old)
        folder = self._store.publisher.folder(job.step, f"{job.tag}-{self._rank}")
        try:
            self._may_write()
            folder.mkdir(parents=True)
            part = write_part(folder, files, staged, self.answers.report_progress, self._key)
            save.send(folder, self._rank, part)
        except (HeadwayError, OSError) as error:
            save.report_failure(self._rank, str(error))
            raise
        finally:
            remove(folder)

    def _fail(self, job: SaveJob, why: str) -> None:
        """Report to the first worker's process that this worker's part will not come: its writer process died."""
        if self._settings.relay is not None and self._is_elsewhere(self._rank):
            with suppress(HeadwayError):  # the tier cannot be opened: the first worker's process waits in vain
                RelayedSave(self._settings.relay, job.step, job.number).report_failure(self._rank, why)
            return
        folder = self._store.publisher.folder(job.step, job.tag)
        with suppress(HeadwayError, OSError):  # the first worker's process no longer waits
            self._wait_for(folder, 0, "the first worker's folder did not come", job=job)
            leave_failure(folder, self._rank, why)

    def _fetch_part(self, save: RelayedSave, folder: Path, rank: int) -> CheckpointPart:
        """Wait for the part of a worker on another machine, and fetch it from the remote tier.

        Raises:
            CheckpointError: It does not come, or has changed on its way.
        """
        what = f"worker {rank} has not sent its part"
        start = time.monotonic()
        alone_since = math.inf
        while (part := save.note(rank)) is None:
            now = time.monotonic()
            if os.getppid() != self._worker:  # the worker died, and perhaps the machines with it
                alone_since = min(alone_since, now)
            if now - start > self._settings.patience_seconds or now - alone_since > _PATIENCE_ALONE_SECONDS:
                raise CheckpointError(f"{what} in time", where=str(folder))
            self.answers.report_progress()
            time.sleep(_ASK_SECONDS)
        save.fetch(part, folder, lambda _: self.answers.report_progress())
        return part

    def _part_of(self, folder: Path, rank: int, save: RelayedSave | None = None) -> CheckpointPart:
        """Wait for another worker's part and return its files."""
        if save is not None and self._is_elsewhere(rank):
            return self._fetch_part(save, folder, rank)
        note = folder / note_name(rank)
        failure = folder / failure_name(rank)
        what = f"worker {rank} has not written its part"
        self._wait_for(note, rank, what, failure=failure, written=partial(_bytes_of, folder, rank))
        part = CheckpointPart.parse(read_json(note, LISTING_BYTES))
        note.unlink()
        return part

    def _wait_for(
        self,
        path: Path,
        rank: int,
        otherwise: str,
        *,
        failure: Path | None = None,
        job: SaveJob | None = None,
        written: Callable[[], int] = lambda: 0,
    ) -> None:
        """Block until a file or folder exists.

        Args:
            path: The file or folder.
            rank: The worker whose process makes it.
            otherwise: The error message if it does not come.
            failure: A file that reports that it will not come.
            job: The job that it belongs to. It will not come once the first worker has abandoned the job, or has begun
                a later step.
            written: Return how many bytes of the part exist so far.

        Raises:
            CheckpointError: It does not come.
        """
        start = grew = time.monotonic()
        deadline = start + self._settings.patience_seconds
        size = 0
        while not is_there(path):
            alone = os.getppid() != self._worker  # the worker died, and perhaps the others with it
            gone = alone and self._has_ended(rank) and not is_there(path)  # before the look for its failure note
            if failure is not None and failure.exists():
                reason = read_text(failure) or "it left no reason, as on a full disk"
                raise CheckpointError(f"{otherwise}: {reason}", where=str(failure.parent))
            if job is not None and (job.number in self.abandoned or self._store.publisher.is_past(job.step, job.tag)):
                raise CheckpointError(
                    f"{otherwise}: the first worker has given up on this save", where=str(path.parent)
                )
            if gone:
                raise CheckpointError(f"{otherwise}, and its process is gone", where=str(path.parent))
            until = deadline
            if alone:
                if (now_there := written()) != size:
                    size = now_there
                    grew = time.monotonic()
                begun = size and not (self._run is not None and is_marked_lost(self._run, rank))
                until = min(deadline, grew + (_PATIENCE_BEGUN_SECONDS if begun else _PATIENCE_ALONE_SECONDS))
            if time.monotonic() > until:
                raise CheckpointError(f"{otherwise} in time", where=str(path.parent))
            self.answers.report_progress()
            time.sleep(_LOOK_SECONDS)


def leave_failure(folder: Path, rank: int, why: str) -> None:
    """Report to the first worker's process that a part will not come; the file's name suffices on a full disk."""
    path = folder / failure_name(rank)
    # Renamed into place, or an early reader would find no reason in it. Not flushed, since the disk may hang.
    whole = path.with_name(f".{path.name}")
    try:
        whole.write_text(why, encoding="utf-8", errors="backslashreplace")
        whole.replace(path)
    except OSError:
        path.touch()


def _bytes_of(folder: Path, rank: int) -> int:
    with suppress(OSError):
        return sum(path.stat().st_size for path in folder.glob(f"shard-{rank:05d}*"))
    return 0


def _failure(error: HeadwayError | OSError, step: int) -> Failed:
    failed = f"the checkpoint of step {step} cannot be written"
    if isinstance(error, HeadwayError):
        # The message of an `OwnerUnknown` does not mention the checkpoint.
        what = f"{failed}: {error.what}" if isinstance(error, OwnerUnknown) else error.what
        return Failed(step, isinstance(error, Fenced), what, error.where, error.fix)
    where = str(error.filename) if error.filename else None
    fix = fix_for(error, "make room there or repair the disk")
    return Failed(step, False, f"{failed}: {error.strerror or error}", where, fix)


def _read(lines: IO[str], messages: queue.SimpleQueue[ToWriter | None], abandoned: set[int]) -> None:
    for line in lines:
        if not line.endswith("\n"):  # the worker was killed while it sent this line
            break
        message = TO_WRITER.decode(line)
        if isinstance(message, Abandon):  # not queued: the job may be under way
            abandoned.add(message.number)
        else:
            messages.put(message)
    messages.put(None)


def main() -> None:
    """Carry out messages from standard input until it ends."""
    for number in STOP_SIGNALS:  # they are for the worker, which tells this process when to end
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # on the CPU, training comes first
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    console.redact_streams()
    start = TO_WRITER.decode(sys.stdin.readline())
    assert isinstance(start, Start), "it is the first message"
    service = WriterService(start.settings, answers, start.lock)
    console.hand_over(lambda text, only_log: service.answers.send(Said(text, only_log)))
    service.answers.send(Ready())
    # A thread reads, so that the worker can always send a message, however long a write takes or hangs.
    messages: queue.SimpleQueue[ToWriter | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, messages, service.abandoned), daemon=True).start()
    pending: Iterator[ToWriter] = iter(messages.get, None)
    if all(service.handle(message) for message in pending):
        service.flush_snapshot()
    service.close()


if __name__ == "__main__":
    main()

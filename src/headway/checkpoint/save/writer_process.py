"""The writer process: each worker starts one by `python -m headway.checkpoint.save.writer_process`.

Messages arrive as JSON lines on standard input; states arrive in staging buffers, which both processes have open. The
process ends when its input ends, after it has finished all jobs: a worker that dies loses no state that it had
submitted. The process does not import PyTorch.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from headway.checkpoint.format.file_layout import Piece, ShardFile, plan_files
from headway.checkpoint.format.folders import TEMPORARY, pruning, remove
from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.format.sealing import key_to_encrypt_with
from headway.checkpoint.format.signing import key_to_sign_with
from headway.checkpoint.post_save import CheckpointMaintainer
from headway.checkpoint.remote.files import SENT_AS
from headway.checkpoint.remote.relay import Relay, RelayedSave
from headway.checkpoint.save.fence import Fence, Fenced, OwnerUnknown
from headway.checkpoint.save.memory_snapshot import MemorySnapshots, SaveJob
from headway.checkpoint.save.publish import Part, failure_name, note_name, write_part
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
_PATIENCE_ALONE_SECONDS, _PATIENCE_BEGUN_SECONDS = 5.0, 60.0


class WriterService:
    """The job loop of a writer process.

    Args:
        settings: The record of a `WriterSettings`, and `lock`, the file descriptor of this process's lock
            (`open_writer_lock`).
        answers: Stream for answers to the worker, as JSON lines.
    """

    def __init__(self, settings: Mapping[str, Any], answers: IO[str]) -> None:
        fence = Fence.parse(settings["fence"]) if settings["fence"] else None
        self._may_write: Callable[[], None] = fence.assert_held if fence else lambda: None
        self._run = fence.run if fence else None
        follows = settings["after_save"] if settings["rank"] == 0 else None
        self._answers, self._worker = answers, os.getppid()
        self._reported_seconds = 0.0
        self._answers_lock = threading.Lock()  # the maintainer answers from threads of its own
        self._after_save = CheckpointMaintainer(follows, self._tell_upload) if follows else None
        self._store = CheckpointStore(
            Path(settings["directory"]),
            settings["keep"],
            self._may_write,
            after_save=self._after_save,
            sign_with=key_to_sign_with() if settings["sign"] and settings["rank"] == 0 else None,
        )
        self._key = key_to_encrypt_with("checkpoint.encrypt") if settings["encrypt"] else None
        self._max_shard_bytes: int = settings["max_shard_bytes"]
        self._rank: int = settings["rank"]
        self._workers: int = settings["workers"]
        self._patience_seconds: float = settings["patience_seconds"]
        self._lock: int | None = settings["lock"]
        self.abandoned: set[int] = set()
        """Numbers of jobs that are over for the first worker."""
        self._snapshots = MemorySnapshots(
            Path(settings["directory"]), self._rank, self._workers, self._is_known_to_have_ended, self._patience_seconds
        )
        self._newest_saved = -1
        self._relay = Relay.parse(settings["relay"]) if settings.get("relay") else None

    def tell(self, kind: str, **content: Any) -> None:
        """Send an answer to the worker, which may be gone."""
        with suppress(BrokenPipeError), self._answers_lock:
            self._answers.write(json.dumps({"kind": kind, **content}) + "\n")
            self._answers.flush()

    def _has_ended(self, rank: int) -> bool:
        """Return whether another worker's writer process is known to have ended."""
        return self._run is not None and writer_has_ended(self._run, rank)

    def _is_known_to_have_ended(self, rank: int) -> bool | None:
        """Return whether another worker's writer process has ended; None if that cannot be known."""
        if self._run is None or not writer_is_here(self._run, rank):
            return None
        return writer_has_ended(self._run, rank)

    def _report_progress(self) -> None:
        """Report progress to the worker, at most once per `_PROGRESS_SECONDS`."""
        now = time.monotonic()
        if now - self._reported_seconds >= _PROGRESS_SECONDS:
            self._reported_seconds = now
            self.tell("progress")

    def _tell_upload(self, step: int, seconds: float | None) -> None:
        self.tell("uploaded", step=step, seconds=seconds)

    def write(self, job: Mapping[str, Any]) -> None:
        """Write this worker's part of a state; the first worker's process also collects all parts and publishes."""
        step, start = job["step"], time.monotonic()
        pieces = [Piece.parse(piece) for piece in job["pieces"]]
        files = plan_files(pieces, self._rank, self._max_shard_bytes)
        nbytes = file_offsets(files)[-1]
        try:
            staged, manifest = StagedFiles(job["descriptor"], files), None
            if self._rank == 0:
                manifest = self._publish(job, files, staged, nbytes)
            elif self._is_elsewhere(self._rank):
                self._send(job, files, staged)
            else:
                self._contribute(job, files, staged)
        except (HeadwayError, OSError) as error:
            self.tell("failed", step=step, fatal=isinstance(error, Fenced), **_in_words(error, step))
            return
        if manifest:  # only the first worker's process knows whether the checkpoint was published
            self._newest_saved, nbytes = step, manifest.total_bytes
        # The answer may cause a rollback to an older checkpoint, which pruning must not remove meanwhile.
        with pruning(self._store.directory) if manifest else nullcontext():
            self.tell("saved", step=step, seconds=time.monotonic() - start, bytes=nbytes)
            if manifest:
                self._store.after_save(manifest)

    def _publish(self, job: Mapping[str, Any], files: list[ShardFile], staged: StagedFiles, nbytes: int) -> Manifest:
        step, cursor = job["step"], job["cursor"]
        save = None
        if self._relay is not None:
            save = RelayedSave(self._relay, step, job["number"])
            save.begin()
        with self._store.saving(step, job["tag"], nbytes) as folder:
            mine = write_part(folder, files, staged, self._report_progress, self._key)
            parts = [mine, *(self._part_of(folder, rank, save) for rank in range(1, self._workers))]
            more = self._after_save.context(step, folder) if self._after_save else {}
            context = {**job["context"], **more}
            if save is not None:
                context[SENT_AS] = save.digits
            return self._store.publisher.finish(folder, parts, cursor, context, self._report_progress)

    def handle(self, job: Mapping[str, Any]) -> bool:
        """Carry out a message from the worker, and return whether more may follow."""
        kind: str = job["kind"]
        if kind == "write":
            self.write(job)
        elif kind == "fail":
            self._fail(job)
        elif kind == "snapshot":
            self._snapshots.add(job)
        elif kind == "release":
            self._snapshots.release_snapshot(job["descriptor"])
        elif kind == "roll back":
            self._newest_saved = min(self._newest_saved, job["step"])
            if self._after_save is not None:
                self._after_save.rolled_back(job["step"], job["left_out"])
        return kind != "end"

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
                self.tell("tier lost", what=lost.what, where=lost.where, fix=lost.fix)

    def _contribute(self, job: Mapping[str, Any], files: list[ShardFile], staged: StagedFiles) -> None:
        """Write this worker's part into the first worker's folder, and leave a note of the files."""
        folder = self._store.publisher.folder(job["step"], job["tag"])
        self._wait_for(folder, 0, "the first worker's folder did not come", job=job)
        try:
            self._may_write()
            part = write_part(folder, files, staged, self._report_progress, self._key)
            write_json(folder / note_name(self._rank), part.record(), exact=True)
        except (HeadwayError, OSError) as error:
            with suppress(OSError):
                leave_failure(folder, self._rank, str(error))
            raise

    def _is_elsewhere(self, rank: int) -> bool:
        """Return whether a worker's part comes from another machine than the first worker's, by the remote tier."""
        return self._relay is not None and rank >= self._relay.first_rank

    def _send(self, job: Mapping[str, Any], files: list[ShardFile], staged: StagedFiles) -> None:
        """Write this worker's part on this machine's own disk, and send it to the remote tier."""
        assert self._relay is not None, "this worker is elsewhere"
        save = RelayedSave(self._relay, job["step"], job["number"])
        for old in self._store.directory.glob(f"{TEMPORARY}*-{self._rank}"):  # of a process that was killed
            remove(old)
        folder = self._store.publisher.folder(job["step"], f"{job['tag']}-{self._rank}")
        try:
            self._may_write()
            folder.mkdir(parents=True)
            part = write_part(folder, files, staged, self._report_progress, self._key)
            save.send(folder, self._rank, part)
        except (HeadwayError, OSError) as error:
            save.report_failure(self._rank, str(error))
            raise
        finally:
            remove(folder)

    def _fail(self, job: Mapping[str, Any]) -> None:
        """Report to the first worker's process that this worker's part will not come: its writer process died."""
        if self._relay is not None and self._is_elsewhere(self._rank):
            with suppress(HeadwayError):  # the tier cannot be opened: the first worker's process waits in vain
                RelayedSave(self._relay, job["step"], job["number"]).report_failure(self._rank, job["why"])
            return
        folder = self._store.publisher.folder(job["step"], job["tag"])
        with suppress(HeadwayError, OSError):  # the first worker's process no longer waits
            self._wait_for(folder, 0, "the first worker's folder did not come", job=job)
            leave_failure(folder, self._rank, job["why"])

    def _fetch_part(self, save: RelayedSave, folder: Path, rank: int) -> Part:
        """Wait for the part of a worker on another machine, and fetch it from the remote tier.

        Raises:
            CheckpointError: It does not come, or has changed on its way.
        """
        what, start, alone_since = f"worker {rank} has not sent its part", time.monotonic(), math.inf
        while (part := save.note(rank)) is None:
            now = time.monotonic()
            if os.getppid() != self._worker:  # the worker died, and perhaps the machines with it
                alone_since = min(alone_since, now)
            if now - start > self._patience_seconds or now - alone_since > _PATIENCE_ALONE_SECONDS:
                raise CheckpointError(f"{what} in time", where=str(folder))
            self._report_progress()
            time.sleep(_ASK_SECONDS)
        save.fetch(part, folder, lambda _: self._report_progress())
        return part

    def _part_of(self, folder: Path, rank: int, save: RelayedSave | None = None) -> Part:
        """Wait for another worker's part and return its files."""
        if save is not None and self._is_elsewhere(rank):
            return self._fetch_part(save, folder, rank)
        note, failure = folder / note_name(rank), folder / failure_name(rank)
        what = f"worker {rank} has not written its part"
        self._wait_for(note, rank, what, failure=failure, written=partial(_bytes_of, folder, rank))
        part = Part.parse(read_json(note, LISTING_BYTES))
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
        deadline, size = start + self._patience_seconds, 0
        while not is_there(path):
            alone = os.getppid() != self._worker  # the worker died, and perhaps the others with it
            gone = alone and self._has_ended(rank) and not is_there(path)  # before the look for its failure note
            if failure is not None and failure.exists():
                reason = read_text(failure) or "it left no reason, as on a full disk"
                raise CheckpointError(f"{otherwise}: {reason}", where=str(failure.parent))
            if job is not None and (
                job.get("number") in self.abandoned or self._store.publisher.is_past(job["step"], job["tag"])
            ):
                raise CheckpointError(
                    f"{otherwise}: the first worker has given up on this save", where=str(path.parent)
                )
            if gone:
                raise CheckpointError(f"{otherwise}, and its process is gone", where=str(path.parent))
            until = deadline
            if alone:
                if (now_there := written()) != size:
                    size, grew = now_there, time.monotonic()
                begun = size and not (self._run is not None and is_marked_lost(self._run, rank))
                until = min(deadline, grew + (_PATIENCE_BEGUN_SECONDS if begun else _PATIENCE_ALONE_SECONDS))
            if time.monotonic() > until:
                raise CheckpointError(f"{otherwise} in time", where=str(path.parent))
            self._report_progress()
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


def _in_words(error: HeadwayError | OSError, step: int) -> dict[str, str | None]:
    if isinstance(error, HeadwayError):
        what = error.what
        if isinstance(error, OwnerUnknown):  # its message does not mention the checkpoint
            what = f"the checkpoint of step {step} cannot be written: {what}"
        return {"what": what, "where": error.where, "fix": error.fix}
    return {
        "what": f"the checkpoint of step {step} cannot be written: {error.strerror or error}",
        "where": str(error.filename) if error.filename else None,
        "fix": fix_for(error, "make room there or repair the disk"),
    }


def _read(lines: IO[str], jobs: queue.SimpleQueue[SaveJob | None], abandoned: set[int]) -> None:
    for line in lines:
        if not line.endswith("\n"):  # the worker was killed while it sent this line
            break
        job = json.loads(line)
        if job["kind"] == "abandon":  # not queued: the job may be under way
            abandoned.add(job["number"])
        else:
            jobs.put(job)
    jobs.put(None)


def main() -> None:
    """Carry out jobs from standard input until it ends."""
    for number in STOP_SIGNALS:  # they are for the worker, which tells this process when to end
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # on the CPU, training comes first
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    console.redact_streams()
    process = WriterService(json.loads(sys.stdin.readline()), answers)
    console.hand_over(lambda text, only_log: process.tell("log" if only_log else "message", text=text))
    process.tell("ready")
    # A thread reads, so that the worker can always send a message, however long a write takes or hangs.
    jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, jobs, process.abandoned), daemon=True).start()
    if all(process.handle(job) for job in iter(jobs.get, None) if job is not None):
        process.flush_snapshot()
    process.close()


if __name__ == "__main__":
    main()

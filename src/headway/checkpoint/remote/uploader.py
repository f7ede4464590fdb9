"""Background uploads to the remote tier, one checkpoint at a time.

A save never waits for an upload. If uploads are slower than saves, a newer checkpoint replaces a waiting one. A failed
upload gives a warning, and the next checkpoint is tried.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.remote.objects import GivenUp
from headway.checkpoint.remote.ownership import FencedError, OtherRunError
from headway.checkpoint.remote.tier import RemoteTier, SupersededError, journal_of
from headway.core.console import notice, warning, write_log
from headway.core.errors import CheckpointError, HeadwayError, reason_of
from headway.core.format import format_bytes, format_seconds


@dataclass(frozen=True)
class _UploadJob:
    folder: Path
    manifest: Manifest
    last: bool

    @property
    def step(self) -> int:
        return self.manifest.step


class UploadQueue:
    """The checkpoint that waits for its upload, and the one under way: what two threads share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: _UploadJob | None = None
        self._sending: _UploadJob | None = None
        self._void: _UploadJob | None = None
        """An upload that need not succeed, since the run rolled back behind its step."""
        self._newest_sent: int | None = None
        """The newest step that is known to be published."""
        self._is_closed = False

    def put(self, job: _UploadJob) -> None:
        """Queue an upload, in place of one that still waits."""
        with self._changed:
            if self._is_closed:
                return
            if self._waiting is not None and self._waiting.step != job.step:
                write_log(f"step {self._waiting.step} is not uploaded: step {job.step} came before its turn")
            self._waiting = job
            self._changed.notify_all()

    def take(self) -> _UploadJob | None:
        """Wait for an upload, which is under way from now on; None if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            if self._is_closed:
                return None
            self._sending = self._waiting
            self._waiting = None
            return self._sending

    def note_sent(self, job: _UploadJob) -> None:
        """Note that a checkpoint is published."""
        with self._changed:
            if job is not self._void:
                self._newest_sent = max(job.step, self._newest_sent or 0)

    def note_end(self) -> None:
        """Note that the upload under way has ended, well or not."""
        with self._changed:
            self._sending = None
            self._changed.notify_all()

    def note_rollback(self, step: int) -> None:
        """Treat uploads of later steps as not done."""
        with self._changed:
            if self._waiting is not None and self._waiting.step > step:
                self._waiting = None
            if self._sending is not None and self._sending.step > step:
                self._void = self._sending
            self._newest_sent = None  # unknown until the next upload

    def is_void(self, job: _UploadJob) -> bool:
        """Return whether the run rolled back during an upload, whose folder may be gone by now."""
        return job is self._void

    def pinned(self) -> set[int]:
        """Return the steps whose upload is under way or queued."""
        with self._changed:
            return {job.step for job in (self._waiting, self._sending) if job is not None}

    def has(self, step: int) -> bool:
        """Return whether a step, or a later one, is published, or this step's upload is under way or queued."""
        pinned = self.pinned()
        sent = self._newest_sent  # read after `pinned`, since an upload may finish in between
        return step in pinned or (sent is not None and sent >= step)

    def wait(self, seconds: float | None) -> bool:
        """Wait until no upload is queued or under way, and return whether that was so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._sending is None, seconds)

    @property
    def is_closed(self) -> bool:
        """Whether there will be no more uploads."""
        return self._is_closed

    def close(self) -> None:
        """Take no more uploads, and drop one that waits."""
        with self._changed:
            self._is_closed = True
            self._waiting = None
            self._changed.notify_all()


class Uploader:
    """A thread that uploads checkpoints.

    Args:
        run: The run directory, which holds the upload journals.
        open_tier: Acquires and returns the remote tier; called on the thread, since it may take long.
        sent: Called on the thread with each published checkpoint, for example to apply retention to the tier.
        tell: Called on the thread with each step and the seconds that its upload took, or None if it failed.
        stopping: Set to make the tier give up.
    """

    def __init__(
        self,
        run: Path,
        open_tier: Callable[[], RemoteTier],
        sent: Callable[[RemoteTier, Manifest], None],
        tell: Callable[[int, float | None], None],
        stopping: threading.Event,
    ) -> None:
        self._run = run
        self._tier = cache(open_tier)
        self._sent = sent
        self._tell = tell
        self._stopping = stopping
        self.queue = UploadQueue()
        self._fenced: HeadwayError | None = None
        self._unsent: tuple[_UploadJob, HeadwayError] | None = None
        """The newest checkpoint that another owner keeps out of the tier, and why."""
        self._has_failed = False
        # A daemon, so that a server that never answers cannot keep the process.
        self._thread = threading.Thread(target=self._work, name="headway-upload", daemon=True)
        self._thread.start()

    def submit(self, folder: Path, manifest: Manifest, last: bool = False) -> None:
        """Queue a checkpoint for upload, in place of one that still waits.

        If another attempt or another run owns the tier, the upload fails at once.

        Args:
            folder: The local checkpoint.
            manifest: Its manifest.
            last: Whether it is the last checkpoint of the run.
        """
        job = _UploadJob(folder, manifest, last)
        if self._fenced is not None and not self.queue.is_closed:
            self._refuse(job, self._fenced)
            return
        self.queue.put(job)

    def close(self, patience_seconds: float | None = None) -> CheckpointError | None:
        """Finish outstanding uploads and end the thread.

        The next attempt continues an unfinished upload; it does not upload finished files again.

        Args:
            patience_seconds: How long to wait at most; None waits as long as it takes.

        Returns:
            The reason if this process can never upload the newest checkpoint; None again when called twice.
        """
        if not self.queue.wait(patience_seconds):
            steps = ", ".join(map(str, sorted(self.queue.pinned())))
            warning(f"the upload of step {steps} is not finished; the next attempt continues it")
        lost = None
        if self._unsent is not None:
            job, why = self._unsent
            what = f"step {job.step} is not uploaded: {why.what}"
            warning(what)
            lost = CheckpointError(what, where=why.where, fix=why.fix)
            self._unsent = None
        self._stopping.set()
        self.queue.close()
        self._thread.join(timeout=1.0)
        return lost

    def _work(self) -> None:
        while (job := self.queue.take()) is not None:
            try:
                self._send(job)
            finally:
                self.queue.note_end()

    def _send(self, job: _UploadJob) -> None:
        start = time.monotonic()
        try:
            tier = self._tier()
            new = tier.publish(job.folder, journal_of(self._run, job.step))
            self._unsent = None  # this newer checkpoint supersedes it
            self.queue.note_sent(job)
            if new:
                seconds = time.monotonic() - start
                size = format_bytes(job.manifest.total_bytes)
                self._tell(job.step, seconds)
                write_log(f"step {job.step} is at {tier.url} ({size} in {format_seconds(seconds)})")
                if self._has_failed:
                    notice(f"step {job.step} is uploaded again: {tier.url}")
                    self._has_failed = False
            try:
                self._follow(tier, job.manifest)
            except (FencedError, OtherRunError) as error:  # this checkpoint is published; the next ones will not be
                self._stop_uploads(error)
        except GivenUp:
            pass  # `close` has reported it
        except (FencedError, OtherRunError) as error:
            self._stop_uploads(error)
            self._refuse(job, error)
        except SupersededError as error:
            self._refuse(job, error)
            warning(f"step {job.step} is not uploaded: {error.what}")
        except Exception as error:
            why = str(error) if isinstance(error, OSError) else reason_of(error)
            if self.queue.is_void(job):
                write_log(f"step {job.step} is not uploaded, and need not be, since the run rolled back: {why}")
            else:
                self._has_failed = True
                self._tell(job.step, None)
                follows = "training continues, and the next checkpoint is tried"
                if job.last:
                    follows = "the run is finished, and the same command uploads it once the store can be used"
                warning(f"step {job.step} is not uploaded: {why}; {follows}")

    def _stop_uploads(self, error: HeadwayError) -> None:
        """Stop uploading, since this attempt no longer owns the tier."""
        self._fenced = error
        warning(f"nothing more is uploaded: {error.what}")

    def _refuse(self, job: _UploadJob, why: HeadwayError) -> None:
        """Fail an upload that another owner's claim or checkpoint forbids.

        `close` reports it if nothing newer is published by then, which may be hours later.
        """
        before = self._unsent
        self._unsent = (job, why)
        if before is None or before[0].step != job.step:
            self._tell(job.step, None)

    def _follow(self, tier: RemoteTier, manifest: Manifest) -> None:
        """Call `sent` for a published checkpoint; its errors do not make the upload a failure."""
        try:
            self._sent(tier, manifest)
        except (GivenUp, FencedError, OtherRunError):
            raise
        except Exception as error:
            warning(f"after the upload of step {manifest.step}: {reason_of(error)}")

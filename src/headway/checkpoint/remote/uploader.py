"""Background uploads to the remote tier, one checkpoint at a time.

A save never waits for an upload. If uploads are slower than saves, a newer checkpoint replaces a waiting one. A failed
upload gives a warning, and the next checkpoint is tried.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.remote.objects import GivenUp
from headway.checkpoint.remote.ownership import FencedError, OtherRunError
from headway.checkpoint.remote.tier import RemoteTier, SupersededError, journal_of
from headway.core.console import notice, warning, write_log
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.format import format_bytes, format_seconds


@dataclass(frozen=True)
class _UploadJob:
    folder: Path
    manifest: Manifest
    last: bool


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
        self._tell = tell
        self._run = run
        self._open_tier = open_tier
        self._sent = sent
        self._stopping = stopping
        self._tier: RemoteTier | None = None
        self._condition = threading.Condition()
        self._waiting: _UploadJob | None = None
        self._sending: _UploadJob | None = None
        self._closed = False
        self._void: _UploadJob | None = None
        self._fenced: HeadwayError | None = None
        self._unsent: _UploadJob | None = None
        self._unsent_since: HeadwayError | None = None
        self.newest_sent: int | None = None
        """The newest step that is known to be published."""
        self.failures = 0
        """Number of failed uploads since the last success."""
        self.lost: CheckpointError | None = None
        """Set by `close` if this process can never upload the newest checkpoint: the reason."""
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
        if self._fenced is not None and not self._closed:
            self._refuse(job, self._fenced)
            return
        with self._condition:
            if self._closed:
                return
            if self._waiting is not None and self._waiting.manifest.step != manifest.step:
                write_log(
                    f"step {self._waiting.manifest.step} is not uploaded: step {manifest.step} came before its turn"
                )
            self._waiting = job
            self._condition.notify_all()

    def pinned(self) -> set[int]:
        """Return the steps that must not be removed, because their upload is under way or queued."""
        with self._condition:
            return {job.manifest.step for job in (self._waiting, self._sending) if job is not None}

    def has(self, step: int) -> bool:
        """Return whether a step, or a later one, is published, or this step's upload is under way or queued."""
        pinned = self.pinned()
        sent = self.newest_sent  # read after `pinned`, since an upload may finish in between
        return step in pinned or (sent is not None and sent >= step)

    def note_rollback(self, step: int) -> None:
        """Treat uploads of later steps as not done, since the run trains these steps again."""
        with self._condition:
            if self._waiting is not None and self._waiting.manifest.step > step:
                self._waiting = None
            if self._sending is not None and self._sending.manifest.step > step:
                self._void = self._sending
            self.newest_sent = None  # unknown until the next upload

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all uploads have finished or failed, and return whether they did in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._waiting is None and self._sending is None, seconds)

    def close(self, patience_seconds: float | None = None) -> None:
        """Finish outstanding uploads and end the thread.

        The next attempt continues an unfinished upload; it does not upload finished files again.

        Args:
            patience_seconds: How long to wait at most; None waits as long as it takes.
        """
        if not self.wait(patience_seconds):
            steps = ", ".join(map(str, sorted(self.pinned())))
            warning(f"the upload of step {steps} is not finished; the next attempt continues it")
        if self._unsent is not None and self._unsent_since is not None:
            step = self._unsent.manifest.step
            why = self._unsent_since
            what = f"step {step} is not uploaded: {why.what}"
            warning(what)
            self.lost = CheckpointError(what, where=why.where, fix=why.fix)
            self._unsent = None
        self._stopping.set()
        with self._condition:
            self._closed = True
            self._waiting = None
            self._condition.notify_all()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting is not None or self._closed)
                if self._closed:
                    return
                job = self._waiting
                self._waiting = None
                self._sending = job
            assert job is not None
            try:
                self._send(job)
            finally:
                with self._condition:
                    self._sending = None
                    self._condition.notify_all()

    def _send(self, job: _UploadJob) -> None:
        step = job.manifest.step
        start = time.monotonic()
        try:
            if self._tier is None:
                self._tier = self._open_tier()
            new = self._tier.publish(job.folder, journal_of(self._run, step))
            self._unsent = None  # this newer checkpoint supersedes it
            with self._condition:
                if job is not self._void:
                    self.newest_sent = max(step, self.newest_sent or 0)
            if new:
                seconds = time.monotonic() - start
                size = format_bytes(job.manifest.total_bytes)
                self._tell(step, seconds)
                write_log(f"step {step} is at {self._tier.url} ({size} in {format_seconds(seconds)})")
                if self.failures:
                    notice(f"step {step} is uploaded again: {self._tier.url}")
                    self.failures = 0
            try:
                self._follow(self._tier, job.manifest)
            except (FencedError, OtherRunError) as error:  # this checkpoint is published; the next ones will not be
                self._stop_uploads(error)
        except GivenUp:
            pass  # `close` has reported it
        except (FencedError, OtherRunError) as error:
            self._stop_uploads(error)
            self._refuse(job, error)
        except SupersededError as error:
            self._refuse(job, error)
            warning(f"step {step} is not uploaded: {error.what}")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, HeadwayError):
                why = error.what
            elif isinstance(error, OSError):
                why = str(error)
            if job is self._void:  # its folder may be gone by now
                write_log(f"step {step} is not uploaded, and need not be, since the run rolled back: {why}")
            else:
                self._failed(job, why)

    def _stop_uploads(self, error: HeadwayError) -> None:
        """Stop uploading, since this attempt no longer owns the tier."""
        self._fenced = error
        warning(f"nothing more is uploaded: {error.what}")

    def _refuse(self, job: _UploadJob, why: HeadwayError) -> None:
        """Fail an upload that another owner's claim or checkpoint forbids.

        `close` reports it if nothing newer is published by then, which may be hours later.
        """
        before = self._unsent
        self._unsent = job
        self._unsent_since = why
        if before is None or before.manifest.step != job.manifest.step:
            self._tell(job.manifest.step, None)

    def _follow(self, tier: RemoteTier, manifest: Manifest) -> None:
        """Call `sent` for a published checkpoint; its errors do not make the upload a failure."""
        try:
            self._sent(tier, manifest)
        except (GivenUp, FencedError, OtherRunError):
            raise
        except Exception as error:
            why = error.what if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
            warning(f"after the upload of step {manifest.step}: {why}")

    def _failed(self, job: _UploadJob, why: str) -> None:
        self.failures += 1
        self._tell(job.manifest.step, None)
        follows = "training continues, and the next checkpoint is tried"
        if job.last:
            follows = "the run is finished, and the same command uploads it once the store can be used"
        warning(f"step {job.manifest.step} is not uploaded: {why}; {follows}")

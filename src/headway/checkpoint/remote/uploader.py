"""Sends checkpoints to the remote tier in the background, one at a time, the newest first in line.

A save never waits for it. When sending is slower than saving, those between are left out; whatever fails is said, and
the next one is tried.
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
class _Order:
    folder: Path
    manifest: Manifest
    last: bool


class Uploader:
    """A thread that sends what it is given.

    Args:
        run: The run directory, where it notes what has been sent.
        open_tier: Gives the remote tier, claimed; called in the thread, since it may take long.
        sent: Told each checkpoint that is there, by the thread; removes what is too old there, for example.
        tell: Told by the thread what came of a step's upload: the seconds that it took, or None when it failed.
        stopping: Makes the tier give up when set.
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
        self._run, self._open_tier, self._sent, self._stopping = run, open_tier, sent, stopping
        self._tier: RemoteTier | None = None
        self._condition = threading.Condition()
        self._waiting: _Order | None = None
        self._sending: _Order | None = None
        self._closed = False
        self._void: _Order | None = None
        self._fenced: HeadwayError | None = None
        self._unsent: _Order | None = None
        self._unsent_since: HeadwayError | None = None
        self.newest_sent: int | None = None
        """The newest step that is known to be there."""
        self.failures = 0
        """Uploads that failed so far."""
        self.lost: CheckpointError | None = None
        """Known after `close`: why the newest checkpoint may never be sent by this process; None where it is there, or
        may still come."""
        # A daemon, so that a server that never answers cannot keep the process.
        self._thread = threading.Thread(target=self._work, name="headway-upload", daemon=True)
        self._thread.start()

    def submit(self, folder: Path, manifest: Manifest, last: bool = False) -> None:
        """Send a checkpoint when the one before is done; it takes the place of one that still waits. Where another
        attempt, or another run, has the tier, its upload has failed at once.

        Args:
            last: The run is finished with it.
        """
        order = _Order(folder, manifest, last)
        if self._fenced is not None and not self._closed:
            self._refuse(order, self._fenced)
            return
        with self._condition:
            if self._closed:
                return
            if self._waiting is not None and self._waiting.manifest.step != manifest.step:
                write_log(
                    f"step {self._waiting.manifest.step} is not uploaded: step {manifest.step} came before its turn"
                )
            self._waiting = order
            self._condition.notify_all()

    def pinned(self) -> set[int]:
        """The steps that must not be removed, because they are being sent or will be."""
        with self._condition:
            return {order.manifest.step for order in (self._waiting, self._sending) if order is not None}

    def has(self, step: int) -> bool:
        """Whether a step, or a later one, is there, or this one on its way."""
        pinned = self.pinned()
        sent = self.newest_sent  # asked for after what is on its way, which may get there meanwhile
        return step in pinned or (sent is not None and sent >= step)

    def rolled_back(self, step: int) -> None:
        """Count what was sent of later steps, or is being sent, as not there: the run does them again."""
        with self._condition:
            if self._waiting is not None and self._waiting.manifest.step > step:
                self._waiting = None
            if self._sending is not None and self._sending.manifest.step > step:
                self._void = self._sending
            self.newest_sent = None  # nor what was sent before: it is looked for again

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is sent or has failed; whether that came about in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._waiting is None and self._sending is None, seconds)

    def close(self, patience_seconds: float | None = None) -> None:
        """Send what is outstanding, for at most so many seconds (as long as it takes when None), and end.

        What is not sent by then, the next attempt sends; nothing of it has to be sent twice.
        """
        if not self.wait(patience_seconds):
            steps = ", ".join(map(str, sorted(self.pinned())))
            warning(f"the upload of step {steps} is not finished; the next attempt goes on with it")
        if self._unsent is not None and self._unsent_since is not None:
            step, why = self._unsent.manifest.step, self._unsent_since
            what = f"step {step} is not uploaded: {why.what}"
            warning(what)
            self.lost = CheckpointError(what, where=why.where, fix=why.fix)
            self._unsent = None
        self._stopping.set()
        with self._condition:
            self._closed, self._waiting = True, None
            self._condition.notify_all()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting is not None or self._closed)
                if self._closed:
                    return
                order, self._waiting = self._waiting, None
                self._sending = order
            assert order is not None
            try:
                self._send(order)
            finally:
                with self._condition:
                    self._sending = None
                    self._condition.notify_all()

    def _send(self, order: _Order) -> None:
        step, start = order.manifest.step, time.monotonic()
        try:
            if self._tier is None:
                self._tier = self._open_tier()
            new = self._tier.publish(order.folder, journal_of(self._run, step))
            self._unsent = None  # a newer one makes up for it
            with self._condition:
                if order is not self._void:
                    self.newest_sent = max(step, self.newest_sent or 0)
            if new:
                seconds = time.monotonic() - start
                size = format_bytes(order.manifest.total_bytes)
                self._tell(step, seconds)
                write_log(f"step {step} is at {self._tier.url} ({size} in {format_seconds(seconds)})")
                if self.failures:
                    notice(f"step {step} is uploaded again: {self._tier.url}")
                    self.failures = 0
            try:
                self._follow(self._tier, order.manifest)
            except (FencedError, OtherRunError) as error:  # of what comes next; this one is there
                self._lose(error)
        except GivenUp:
            pass  # `close` has said so
        except (FencedError, OtherRunError) as error:
            self._lose(error)
            self._refuse(order, error)
        except SupersededError as error:
            self._refuse(order, error)
            warning(f"step {step} is not uploaded: {error.what}")
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, HeadwayError):
                why = error.what
            elif isinstance(error, OSError):
                why = str(error)
            if order is self._void:  # its folder may be gone meanwhile
                write_log(f"step {step} is not uploaded, and need not be, since the run went back: {why}")
            else:
                self._failed(order, why)

    def _lose(self, error: HeadwayError) -> None:
        """Somebody else has the tier."""
        self._fenced = error
        warning(f"nothing more is uploaded: {error.what}")

    def _refuse(self, order: _Order, why: HeadwayError) -> None:
        """Give up an order that somebody else's claim or checkpoint stands against. What is not there at the end is
        reported then, for it may be hours later."""
        before, self._unsent, self._unsent_since = self._unsent, order, why
        if before is None or before.manifest.step != order.manifest.step:
            self._tell(order.manifest.step, None)

    def _follow(self, tier: RemoteTier, manifest: Manifest) -> None:
        """What is to be done once a checkpoint is there; that it is stays true, whatever becomes of it."""
        try:
            self._sent(tier, manifest)
        except (GivenUp, FencedError, OtherRunError):
            raise
        except Exception as error:
            why = error.what if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
            warning(f"after the upload of step {manifest.step}: {why}")

    def _failed(self, order: _Order, why: str) -> None:
        self.failures += 1
        self._tell(order.manifest.step, None)
        follows = "training goes on, and the next checkpoint is tried"
        if order.last:
            follows = "the run is finished, and the same command sends it when the store can be used"
        warning(f"step {order.manifest.step} is not uploaded: {why}; {follows}")

"""The follower: sends what is new in a run directory to one tracker, until the run has ended and all has arrived.

It reads files only, so a slow or dead tracker costs the training nothing. `delivery` sends each value once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from headway.core.coordination.owner import read_owner
from headway.core.errors import HeadwayError
from headway.core.machine.system import host_name
from headway.telemetry.metrics import FILE_NAME
from headway.telemetry.record import NOT_ENDED, Run
from headway.tracking.cursor import CursorFile
from headway.tracking.delivery import Announcer, Delivery
from headway.tracking.describe import run_id, status
from headway.tracking.sink import LostRun, Sink, Status, Unreachable

#: Seconds between looks at the run directory.
POLL_SECONDS = 1.0
#: Seconds before another try, at first and at most.
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 30.0
#: A run on another machine whose last attempt has ended counts as ended after this long without a new one.
_QUIET_SECONDS = 150.0
#: A run on another machine that has no lease counts as dead after it has written nothing for so long.
_SILENT_SECONDS = 3600.0


@dataclass(frozen=True)
class Waiting:
    """How a follower waits and learns that the run is over."""

    is_over: Callable[[], bool]
    """Whether the run has ended: what is there now is all."""
    goes_on: Callable[[], bool] = lambda: False
    """Whether the run continues although this follower ends."""
    must_stop: Callable[[], bool] = lambda: False
    """Whether to end now, whatever has not arrived."""
    sleep: Callable[[float], None] = time.sleep
    patience_seconds: float | None = None
    """How long to try to reach a tracker again once the run is over; None: for ever."""


class FollowerState(Enum):
    """What a follower is at."""

    WAITING = "the run has no id yet"
    CLOSED = "the tracker is to be opened"
    SENDING = "what is new is sent"
    DONE = "the run is over, and all has arrived"


@dataclass
class _Outage:
    """A tracker does not answer."""

    since: float
    delay: float = _FIRST_DELAY
    was_over: bool = False
    """Whether the run was over at the last try."""


class Follower:
    """Follows one run into one sink.

        WAITING --> CLOSED --> SENDING --> DONE
                      ^           |
                      '-----------'  the tracker does not answer, or has lost the run

    Args:
        path: The run directory.
        sink: The sink.
        label: Name and target of the sink, for people.
        cursor: The cursor, locked.
        report: Called with a line when the tracker does not answer, and when it does again.
        waiting: See there.
    """

    def __init__(
        self,
        path: Path,
        sink: Sink,
        label: str,
        cursor: CursorFile,
        *,
        report: Callable[[str], None],
        waiting: Waiting,
    ) -> None:
        self._path = path
        self._sink = sink
        self._label = label
        self._cursor = cursor
        self._report = report
        self._waiting = waiting
        self.state = FollowerState.WAITING
        self._announcer = Announcer(path, sink, cursor)
        self._outage: _Outage | None = None
        self._has_lost = False

    def run(self) -> None:
        """Send everything, and return when the run is over and all has arrived, or when it must stop.

        Raises:
            HeadwayError: the tracker refuses, or did not answer in time.
        """
        while self.state is not FollowerState.DONE and not self._waiting.must_stop():
            try:
                if self.state is FollowerState.WAITING:
                    self._wait_for_id()
                else:
                    self._send_all()
            except HeadwayError:
                raise
            except LostRun as error:
                self._start_over(error)
            except Exception as error:  # a sink of the user's own may raise anything
                self._wait_for_tracker(error)

    def _wait_for_id(self) -> None:
        if run_id(Run(self._path)) is not None:
            self.state = FollowerState.CLOSED
        elif self._waiting.is_over():
            self.state = FollowerState.DONE
        else:
            self._waiting.sleep(POLL_SECONDS)

    def _send_all(self) -> None:
        """Open the sink, and send until the run is over; close the sink whatever happens."""
        try:
            self._cursor.open(run_id(Run(self._path)) or "", self._label)
            delivery = Delivery(self._path, self._sink, self._cursor, self._announcer)
            delivery.open()
            self.state = FollowerState.SENDING
            while self.state is FollowerState.SENDING and not self._waiting.must_stop():
                self._send_new(delivery)
        finally:
            if self.state is FollowerState.SENDING:
                self.state = FollowerState.CLOSED
            self._sink.close()

    def _send_new(self, delivery: Delivery) -> None:
        is_over = self._waiting.is_over()  # before the look: what is written later is not missed
        sent_all = delivery.send_next()
        if sent_all:
            self._announcer.describe(at_once=is_over)
        if sent_all or not is_over:
            self._announcer.set_status(*self._status(is_over, delivery.last_time))
        if (sent_all and is_over) or delivery.is_flush_due:
            delivery.flush()
        self._has_lost = False
        if self._outage is not None:
            self._outage = None
            self._report(f"{self._label} answers again")
        if sent_all and is_over:
            self._announcer.send_model()
            self.state = FollowerState.DONE
        elif sent_all:
            self._waiting.sleep(POLL_SECONDS)

    def _status(self, is_over: bool, last_time: float | None) -> tuple[Status, float | None]:
        """Return how the run stands, and when it ended."""
        if not is_over or self._waiting.goes_on():
            return "running", None
        found, ended = status(Run(self._path))
        if found == "running":
            found = "killed"  # its command is gone
        return found, last_time if ended is None else ended

    def _start_over(self, error: LostRun) -> None:
        """Forget what was sent, since the tracker does not know the run any more."""
        self._cursor.restart()
        if self._has_lost:
            # Lost again before anything has arrived: a server that answers so must not be asked without end.
            self._wait_for_tracker(error)
        else:
            self._has_lost = True
            self._report(f"{self._label}: {error}; everything is sent again")

    def _wait_for_tracker(self, error: Exception) -> None:
        """Wait before the next try, longer each time.

        Raises:
            HeadwayError: the run is over, and patience is at its end.
        """
        why = str(error) if isinstance(error, (Unreachable, LostRun)) else f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if self._outage is None:
            self._outage = _Outage(now)
            self._report(f"{self._label} does not answer: {why}; nothing is lost, and it is tried again")
        outage = self._outage
        is_over = self._waiting.is_over()
        if is_over and not outage.was_over:  # patience begins with the end of the run, however long the trouble lasts
            self._outage = outage = _Outage(now, was_over=True)
        patience = self._waiting.patience_seconds
        if patience is not None and is_over and time.monotonic() - outage.since >= patience:
            raise HeadwayError(
                f"{self._label} does not answer: {why}",
                where=str(self._path),
                fix=f"headway track {self._path} sends the rest when it does",
            ) from error
        self._waiting.sleep(outage.delay)
        outage.delay = min(2 * outage.delay, _LONGEST_DELAY)


def last_written(path: Path) -> float:
    """Return when a run last wrote records, or readings of its machines, Unix seconds; 0 if it has not."""
    newest = max((folder.name for folder in path.glob("attempts/*")), default="")
    moments = [0.0]
    for file in (path / FILE_NAME, *(path / "attempts" / newest).glob("*")):
        with suppress(OSError):
            moments.append(file.stat().st_mtime)
    return max(moments)


def is_live(path: Path) -> bool:
    """Return whether the command of a run is there, as far as this machine can tell, also between two attempts."""
    run = Run(path)
    owner = read_owner(path)
    stands, ended = status(run)
    if run.state == NOT_ENDED and time.time() - last_written(path) > _SILENT_SECONDS:
        return False
    if owner is None:
        return stands == "running"
    if owner.host != host_name():
        return stands == "running" or (ended is not None and time.time() - ended < _QUIET_SECONDS)
    import psutil

    try:
        # Process numbers are reused: one that was born after the attempt began is another one.
        return bool(psutil.Process(owner.pid).create_time() < owner.since + 5)
    except psutil.Error:
        return False

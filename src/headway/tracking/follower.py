"""The follower: sends what is new in a run directory to one tracker, until the run has ended and all has arrived.

It reads files only, so a slow or dead tracker costs the training nothing. Per batch:

    cursor {place, pending}  ->  sink.send(batch)  ->  cursor {place = pending, state}

A kill between any two of these leaves a cursor that says which batch may have arrived; the next follower sends just
that batch again as `uncertain`, and the sink finds out what of it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headway.checkpoint.save.fence import read_owner
from headway.core.errors import HeadwayError
from headway.core.files.hashes import fingerprint
from headway.core.machine.system import host_name
from headway.telemetry.metrics import FILE_NAME
from headway.telemetry.record import NOT_ENDED, Run, as_time
from headway.tracking.cursor import Cursor, CursorFile
from headway.tracking.describe import describe, is_changed, run_id, stamps, status
from headway.tracking.history import Block, History, Tail
from headway.tracking.readings import Readings
from headway.tracking.sink import Batch, LostRun, Sink, TrackedRun, Unreachable

#: Seconds between looks at the run directory, and between looks at all that describes the run.
POLL_SECONDS, DESCRIBE_SECONDS = 1.0, 10.0
#: Seconds between flushes of a sink that does not say of each batch that it has arrived.
FLUSH_SECONDS = 300.0
#: Seconds before another try, at first and at most.
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 30.0
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


class Follower:
    """Follows one run into one sink.

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
        self._path, self._sink, self._label = path, sink, label
        self._file, self._report, self._waiting = cursor, report, waiting
        self._tail = Tail(path)
        self._trouble: str | None = None
        self._has_lost = False
        self._cursor = Cursor("")
        self._history = self._new_history()
        self._place = 0
        self._uncertain_to: int | None = None
        self._flushed_at = 0.0
        self._described: str | None = None
        self._described_at = 0.0
        self._looked: object = None

    def run(self) -> None:
        """Send everything, and return when the run is over and all has arrived, or when it must stop.

        Raises:
            HeadwayError: the tracker refuses, or did not answer in time.
        """
        delay, since, was_over = _FIRST_DELAY, time.monotonic(), False
        while not self._waiting.must_stop():
            try:
                if self._follow():
                    return
            except HeadwayError:
                raise
            except Exception as error:  # a sink of the user's own may raise anything
                if isinstance(error, LostRun):
                    self._save(Cursor(self._cursor.run, sink=self._label))
                    if not self._has_lost:
                        self._has_lost = True
                        self._report(f"{self._label}: {error}; everything is sent again")
                        continue
                    # Lost again before anything has arrived: a server that answers so must not be asked without end.
                known = isinstance(error, (Unreachable, LostRun))
                why = str(error) if known else f"{type(error).__name__}: {error}"
                if self._trouble is None:
                    delay, since = _FIRST_DELAY, time.monotonic()
                    self._trouble = f"{self._label} does not answer: {why}"
                    self._report(f"{self._trouble}; nothing is lost, and it is tried again")
                is_over = self._waiting.is_over()
                if is_over and not was_over:  # patience begins with the end of the run, however long the trouble lasts
                    delay, since, was_over = _FIRST_DELAY, time.monotonic(), True
                patience = self._waiting.patience_seconds
                if patience is not None and is_over and time.monotonic() - since >= patience:
                    raise HeadwayError(
                        f"{self._label} does not answer: {why}",
                        where=str(self._path),
                        fix=f"headway track {self._path} sends the rest when it does",
                    ) from error
                self._waiting.sleep(delay)
                delay = min(2 * delay, _LONGEST_DELAY)

    def _follow(self) -> bool:
        """Open the sink, send until the run is over, and return whether that is so."""
        ours = self._begin()
        if ours is None:
            return self._waiting.is_over()
        try:
            self._open(ours)
            while not self._waiting.must_stop():
                is_over = self._waiting.is_over()  # before the look: what is written later is not missed
                sent_all = self._send_new()
                if sent_all:
                    self._describe(ended=is_over)
                if sent_all or not is_over:
                    self._set_status(is_over)
                if (sent_all and is_over) or time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                    self._flush()
                if self._trouble is not None:
                    self._report(f"{self._label} answers again")
                    self._trouble = None
                self._has_lost = False
                if is_over and sent_all:
                    return True
                if sent_all:
                    self._waiting.sleep(POLL_SECONDS)
            return False
        finally:
            self._sink.close()

    def _begin(self) -> str | None:
        """Wait for the run's id, and return it; None if the run is over without one."""
        while (found := run_id(Run(self._path))) is None:
            if self._waiting.is_over() or self._waiting.must_stop():
                return None
            self._waiting.sleep(POLL_SECONDS)
        return found

    def _open(self, run: str) -> None:
        cursor = self._file.read(run)
        if not all(self._tail.reaches(place) for place in (cursor.place, cursor.pending or 0)):
            cursor = Cursor(run)  # the file was cut, as by a power failure, or replaced
        # The status is sent again: a sink may have been killed before it made certain of the last one.
        self._cursor = replace(cursor, sink=self._label, status=None)
        self._place, self._uncertain_to = cursor.place, cursor.pending
        self._flushed_at = time.monotonic()
        self._history = self._new_history()
        for block in self._tail.blocks(0, self._cursor.place):
            for record in block.records:
                if self._history.begins_generation(record):
                    self._history.begin_generation(record)
                self._history.points(record)
        if self._cursor.generation > self._history.generation:  # it was begun, and nothing of it has arrived
            for block in self._tail.blocks(self._cursor.place):
                if block.records:
                    self._history.begin_generation(block.records[0])
                    break
            self._history.generation = self._cursor.generation
        self._described, self._looked = None, None
        self._open_generation()
        self._describe()

    def _open_generation(self) -> None:
        state = self._sink.open(self._tracked(), dict(self._cursor.state))
        self._save(replace(self._cursor, state=dict(state)))

    def _tracked(self) -> TrackedRun:
        first = max(0, self._history.first_step - 1)
        name, generation = self._path.resolve().name, self._history.generation
        return TrackedRun(self._cursor.run, name, self._path, generation, first, self._started())

    def _started(self) -> float | None:
        """Return when the first attempt of this generation started."""
        records = Run(self._path).attempt_records
        number = self._history.first_attempt
        first = next(iter(records.values()), {}) if number is None else records.get(number, {})
        return as_time(first.get("started"))

    def _new_history(self) -> History:
        return History(
            lambda attempt, before, step: is_changed(Run(self._path), attempt, before), Readings(self._path).due
        )

    def _send_new(self) -> bool:
        """Send the next batch, first the one that may have been sent, and return whether nothing is left."""
        for block in self._tail.blocks(self._place, self._uncertain_to):
            self._send(block, uncertain=self._uncertain_to is not None)
            return False
        if self._uncertain_to is not None:
            self._uncertain_to = None
            return False
        return True

    def _flush(self) -> None:
        self._flushed_at = time.monotonic()
        state = self._sink.flush()
        self._save(replace(self._cursor, place=self._place, pending=None, state=dict(state)))

    def _send(self, block: Block, uncertain: bool) -> None:
        points, end = [], block.end
        highest = self._history.highest
        for record, place in zip(block.records, block.places, strict=True):
            if self._history.begins_generation(record):
                if place > self._place:
                    end = place  # this batch ends here
                    break
                self._history.begin_generation(record)
                self._begin_generation()
                highest = {}
            points += self._history.points(record)
        self._save(replace(self._cursor, pending=max(end, self._cursor.pending or 0)))
        state = self._sink.send(Batch(points, highest, uncertain)) if points else self._cursor.state
        self._place = end
        if self._uncertain_to is not None and end >= self._uncertain_to:
            self._uncertain_to = None
        if state is not None:
            self._save(replace(self._cursor, place=end, pending=self._uncertain_to, state=dict(state)))

    def _begin_generation(self) -> None:
        """Close the generation before at the tracker, and open the next one there."""
        self._flush()
        self._sink.set_status("killed", self._history.last_time)
        self._sink.close()
        self._cursor = replace(self._cursor, state={}, status=None, generation=self._history.generation)
        self._described = None
        self._open_generation()
        self._describe()

    def _describe(self, ended: bool = False) -> None:
        """Send the description if it has changed; look at it not too often."""
        now = time.monotonic()
        if not ended and self._described is not None and now - self._described_at < DESCRIBE_SECONDS:
            return
        self._described_at, looked = now, stamps(self._path)
        if looked == self._looked and self._described is not None:
            return
        found = describe(Run(self._path))
        if (known := fingerprint(asdict(found))) != self._described:
            state = self._sink.describe(found)
            self._save(replace(self._cursor, state=dict(state)))
        self._described, self._looked = known, looked

    def _set_status(self, is_over: bool) -> None:
        has_ended = is_over and not self._waiting.goes_on()
        now, ended = status(Run(self._path)) if has_ended else ("running", None)
        if now == "running" and has_ended:
            now = "killed"  # its command is gone
        if has_ended and ended is None:
            ended = self._history.last_time
        if now != self._cursor.status:
            self._sink.set_status(now, ended)
            self._save(replace(self._cursor, status=now))

    def _save(self, cursor: Cursor) -> None:
        if cursor != self._cursor or not self._file.path.exists():
            self._file.write(cursor)
        self._cursor = cursor


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
    run, owner = Run(path), read_owner(path)
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

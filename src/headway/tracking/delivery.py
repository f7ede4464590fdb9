"""What a follower sends to an open tracker: points, each once, and how the run is described and stands.

Per batch of points:

    cursor {place, pending}  ->  sink.send(batch)  ->  cursor {place = pending, state}

A kill between any two of these leaves a cursor that says which batch may have arrived; the next follower sends just
that batch again as `uncertain`, and the sink finds out what of it is there.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from headway.core.files.hashes import fingerprint
from headway.telemetry.record import Run, as_time
from headway.tracking.cursor import CursorFile
from headway.tracking.describe import describe, is_changed, stamps
from headway.tracking.history import Block, History, Tail
from headway.tracking.readings import Readings
from headway.tracking.run_model import run_model
from headway.tracking.sink import Batch, ModelSink, Sink, Status, TrackedRun

#: Seconds between looks at all that describes the run.
DESCRIBE_SECONDS = 10.0
#: Seconds between flushes of a sink that does not say of each batch that it has arrived.
FLUSH_SECONDS = 300.0


class Announcer:
    """Sends what describes a run, and how it stands, when that has changed.

    Args:
        path: The run directory.
        sink: The sink.
        cursor: The cursor, read.
    """

    def __init__(self, path: Path, sink: Sink, cursor: CursorFile) -> None:
        self._path = path
        self._sink = sink
        self._cursor = cursor
        self._described: str | None = None
        self._described_at = 0.0
        self._looked: object = None

    def forget(self) -> None:
        """Send the description again next time: the tracker may not have it."""
        self._described = self._looked = None

    def describe(self, *, at_once: bool = False) -> None:
        """Send the description if it has changed; look at it not too often, or at once."""
        now = time.monotonic()
        if not at_once and self._described is not None and now - self._described_at < DESCRIBE_SECONDS:
            return
        self._described_at = now
        looked = stamps(self._path)
        if looked == self._looked and self._described is not None:
            return
        found = describe(Run(self._path))
        known = fingerprint(asdict(found))
        if known != self._described:
            self._cursor.change(state=dict(self._sink.describe(found)))
        self._described = known
        self._looked = looked

    def set_status(self, status: Status, ended: float | None) -> None:
        """Send how the run stands, if the tracker does not know it."""
        if status != self._cursor.current.status:
            self._sink.set_status(status, ended)
            self._cursor.change(status=status)

    def send_model(self) -> None:
        """Send the model of a run that has finished, once, to a sink that takes it."""
        sink = self._sink
        known = self._cursor.current
        if known.status != "finished" or not isinstance(sink, ModelSink) or not sink.upload.log_model:
            return
        step = Run(self._path).step
        wanted = fingerprint({"step": step, **sink.upload.model_dump(exclude={"limit_gib"})})
        if known.model == wanted:
            return
        with run_model(self._path, sink.upload, self._cursor.path.with_suffix(".model")) as model:
            state = sink.send_model(model)
        self._cursor.change(model=wanted, state=dict(state))


class Delivery:
    """Sends the points of a run to a sink from where the cursor is; a new one for each time that the sink is opened.

    Args:
        path: The run directory.
        sink: The sink, which `open` opens.
        cursor: The cursor, read.
        announcer: Sends what else there is about the run.
    """

    def __init__(self, path: Path, sink: Sink, cursor: CursorFile, announcer: Announcer) -> None:
        self._path = path
        self._sink = sink
        self._cursor = cursor
        self._announcer = announcer
        self._tail = Tail(path)
        self._history = History(
            lambda attempt, before, step: is_changed(Run(path), attempt, before), Readings(path).due
        )
        self._place = 0
        self._uncertain_to: int | None = None
        self._flushed_at = time.monotonic()

    @property
    def last_time(self) -> float | None:
        """Time of the newest record so far."""
        return self._history.last_time

    def open(self) -> None:
        """Open the sink where the cursor is, and describe the run."""
        kept = self._cursor.current
        if not all(self._tail.reaches(place) for place in (kept.place, kept.pending or 0)):
            kept = self._cursor.restart()  # the file was cut, as by a power failure, or replaced
        self._place = kept.place
        self._uncertain_to = kept.pending
        for block in self._tail.blocks(0, kept.place):
            for record in block.records:
                if self._history.begins_generation(record):
                    self._history.begin_generation(record)
                self._history.points(record)
        if kept.generation > self._history.generation:  # it was begun, and nothing of it has arrived
            for block in self._tail.blocks(kept.place):
                if block.records:
                    self._history.begin_generation(block.records[0])
                    break
            self._history.generation = kept.generation
        self._open_generation()

    def send_next(self) -> bool:
        """Send the next batch, first the one that may have been sent, and return whether nothing is left."""
        for block in self._tail.blocks(self._place, self._uncertain_to):
            self._send(block, uncertain=self._uncertain_to is not None)
            return False
        if self._uncertain_to is not None:
            self._uncertain_to = None
            return False
        return True

    @property
    def is_flush_due(self) -> bool:
        """Whether the last flush is long ago."""
        return time.monotonic() - self._flushed_at > FLUSH_SECONDS

    def flush(self) -> None:
        """Make certain that everything has arrived."""
        self._flushed_at = time.monotonic()
        state = self._sink.flush()
        self._cursor.change(place=self._place, pending=None, state=dict(state))

    def _send(self, block: Block, uncertain: bool) -> None:
        points = []
        end = block.end
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
        self._cursor.change(pending=max(end, self._cursor.current.pending or 0))
        state = self._sink.send(Batch(points, highest, uncertain)) if points else self._cursor.current.state
        self._place = end
        if self._uncertain_to is not None and end >= self._uncertain_to:
            self._uncertain_to = None
        if state is not None:
            self._cursor.change(place=end, pending=self._uncertain_to, state=dict(state))

    def _begin_generation(self) -> None:
        """Close the generation before at the tracker, and open the next one there."""
        self.flush()
        self._sink.set_status("killed", self._history.last_time)
        self._sink.close()
        self._cursor.begin_generation(self._history.generation)
        self._open_generation()

    def _open_generation(self) -> None:
        history = self._history
        started = self._started()
        name = self._path.resolve().name
        first = max(0, history.first_step - 1)
        run = TrackedRun(self._cursor.current.run, name, self._path, history.generation, first, started)
        state = self._sink.open(run, dict(self._cursor.current.state))
        self._cursor.change(state=dict(state))
        self._announcer.forget()
        self._announcer.describe()

    def _started(self) -> float | None:
        """Return when the first attempt of this generation started."""
        records = Run(self._path).attempt_records
        number = self._history.first_attempt
        first = next(iter(records.values()), {}) if number is None else records.get(number, {})
        return as_time(first.get("started"))

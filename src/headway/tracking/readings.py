"""Readings of machines as points of a run: each belongs to the step that was recorded after it.

A reading has no step, and machines write their own files. So a record of the metrics takes along the newest reading of
each machine that is old enough to have arrived on every disk: which one follows from the times in the files alone, and
a follower that starts again finds the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.telemetry.metrics import NO_VALUES, recorded_number
from headway.telemetry.record import as_time
from headway.telemetry.system import machine_of, reading_files
from headway.telemetry.tail import JsonLinesTail

#: How long after it was made a reading may appear in its file: the clocks of machines differ, and shared disks lag.
LAG_SECONDS = 30.0
#: Seconds of the run between looks at the files.
_LOOK_SECONDS = 10.0
_PREFIX = "system/"


class Readings:
    """The readings of a run's machines, handed out in the order of the records that take them along.

    Args:
        run: The run directory.
        lag_seconds: How old a reading must be; 0 for a reader whose points need not be the same each time.
    """

    def __init__(self, run: Path, lag_seconds: float = LAG_SECONDS) -> None:
        self._run = run
        self._lag = lag_seconds
        self._attempt = -1
        self._files: dict[Path, _File] = {}
        self._next_look = 0.0

    def due(self, attempt: int, moment: float) -> Iterator[tuple[str, float]]:
        """Yield names and values of what the record of an attempt at a moment takes along."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._files = {}
            self._next_look = 0.0
        if moment >= self._next_look:
            self._next_look = moment + _LOOK_SECONDS
            for path in reading_files(self._run / "attempts" / f"{self._attempt:03d}"):
                self._files.setdefault(path, _File(path)).look()
        for path, file in self._files.items():
            newest = file.take(moment - self._lag)
            if newest is not None:
                yield from _points(machine_of(path), newest)


class _File:
    """The readings of one machine that no record has taken along. Of a long file one block at a time is in memory."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonLinesTail(path)
        self._has_more = False
        self._waiting: deque[tuple[float, dict[str, Any]]] = deque()

    def look(self) -> None:
        """Read again, when what waits has been taken."""
        self._has_more = True

    def take(self, until: float) -> dict[str, Any] | None:
        """Take the readings up to a moment, and return the newest of them; None if there is none."""
        newest = None
        while self._fill() and self._waiting[0][0] <= until:
            newest = self._waiting.popleft()[1]
        return newest

    def _fill(self) -> bool:
        while not self._waiting and self._has_more:
            block = next(self._tail.read(), None)  # the file is closed again: there may be thousands of machines
            self._has_more = block is not None
            records = () if block is None else block[1]
            self._waiting += [(made, one) for one in records if (made := as_time(one.get("time"))) is not None]
        return bool(self._waiting)


def _points(machine: str, reading: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in reading.items():
        number = recorded_number(value)
        if number is not None and name not in NO_VALUES:
            yield f"{_PREFIX}{machine}/{name.removeprefix(_PREFIX)}", number


def machine_in(name: str) -> str | None:
    """Return the machine in the name of a point that is a reading; None if it is a value of a record."""
    return name.split("/")[1] if name.startswith(_PREFIX) else None

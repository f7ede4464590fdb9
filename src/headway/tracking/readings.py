"""Readings of machines as points of a run: each belongs to the step that was recorded after it.

A reading has no step, and machines write their own files. So a record of the metrics takes along the newest reading of
each machine that is old enough to have arrived on every disk: which one follows from the times in the files alone, and
a follower that starts again finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.core.foreign import as_number
from headway.telemetry.metrics import NO_VALUES, recorded_number
from headway.telemetry.system import machine_of, reading_files
from headway.tracking.tail import JsonLinesTail

#: How long after it was made a reading may appear in its file: the clocks of machines differ, and shared disks lag.
LAG_SECONDS = 30.0
#: Seconds of the run between looks at the files.
_LOOK_SECONDS = 10.0


class Readings:
    """The readings of a run's machines, handed out in the order of the records that take them along.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._attempt = -1
        self._tails: dict[Path, JsonLinesTail] = {}
        self._waiting: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        self._next_look = 0.0

    def due(self, attempt: int, moment: float) -> Iterator[tuple[str, float]]:
        """Yield names and values of what the record of an attempt at a moment takes along."""
        if attempt != self._attempt:
            self._attempt, self._tails, self._waiting, self._next_look = attempt, {}, {}, 0.0
        if moment >= self._next_look:
            self._next_look = moment + _LOOK_SECONDS
            self._look()
        for machine, waiting in self._waiting.items():
            number = sum(made <= moment - LAG_SECONDS for made, _ in waiting)
            if number:
                newest = waiting[number - 1][1]
                del waiting[:number]
                yield from _points(machine, newest)

    def _look(self) -> None:
        for path in reading_files(self._run / "attempts" / f"{self._attempt:03d}"):
            tail = self._tails.setdefault(path, JsonLinesTail(path))
            waiting = self._waiting.setdefault(machine_of(path), [])
            for _, records in tail.read():
                waiting += [(made, one) for one in records if (made := as_number(one.get("time"))) is not None]


def _points(machine: str, reading: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in reading.items():
        number = recorded_number(value)
        if number is not None and name not in NO_VALUES:
            yield f"system/{machine}/{name.removeprefix('system/')}", number

"""Which values of `metrics.jsonl` are sent: each (metric, step) of a generation once.

A restart repeats steps. They have the same bits, or, with `determinism: off`, others of the same kind; in both cases
the first value stays. Steps that are trained again on purpose begin a new generation: after
`headway checkpoints restore`, and after a change that begins before the last step that was sent. The same prefix of the
file always gives the same points in the same order, so a follower that starts again knows from it what it has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.files.foreign import LINE_BYTES, open_regular, parse_json_lines
from headway.telemetry.metrics import FILE_NAME, NO_VALUES, is_own, place_of, recorded_number
from headway.telemetry.record import as_time
from headway.telemetry.tail import whole_lines
from headway.tracking.sink import Point

#: Most bytes of the file in a batch: a few hundred steps.
BATCH_BYTES = 128 * 1024
#: Steps in one block of a set of steps.
_BLOCK = 8192


class StepSet:
    """A set of steps, in blocks of bits: a million steps of fifty metrics take 6 MB."""

    def __init__(self) -> None:
        self._blocks: dict[int, bytearray] = {}
        self.highest = -1

    def add(self, step: int) -> bool:
        """Add a step, and return whether it is new."""
        number, place = divmod(step, _BLOCK)
        block = self._blocks.setdefault(number, bytearray(_BLOCK // 8))
        byte, bit = divmod(place, 8)
        if block[byte] & (1 << bit):
            return False
        block[byte] |= 1 << bit
        self.highest = max(self.highest, step)
        return True


class History:
    """The points to send of records that come in the order of the file.

    Args:
        is_changed: Whether what an attempt trains from a step on differs from what earlier ones did. It gets the number
            of the attempt, that of the attempt recorded before it, and the step.
        due: Returns what else a record takes along, by its attempt and its time: names and values.
    """

    def __init__(
        self,
        is_changed: Callable[[int, int, int], bool],
        due: Callable[[int, float], Iterable[tuple[str, float]]] = lambda attempt, moment: (),
    ) -> None:
        self._is_changed = is_changed
        self._due = due
        self._sent: dict[str, StepSet] = {}
        self._attempt = -1
        self._last_step = -1
        self.generation = 0
        self.first_step = 0
        #: The attempt that begins the generation, None for the first one; time of the newest record.
        self.first_attempt: int | None = None
        self.last_time: float | None = None

    @property
    def highest(self) -> dict[str, int]:
        """The highest step of each metric so far in this generation."""
        return {name: steps.highest for name, steps in self._sent.items()}

    def begins_generation(self, record: dict[str, Any]) -> bool:
        """Return whether this record, the next of the file, begins a generation."""
        found = place_of(record)
        if found is None or self._attempt < 0 or found[1] <= self._attempt:
            return False
        step, attempt = found
        return step <= self._last_step and self._is_changed(attempt, self._attempt, step)

    def begin_generation(self, record: dict[str, Any]) -> None:
        """Forget what was sent: a generation begins with this record."""
        step, self.first_attempt = place_of(record) or (0, None)
        self.generation += 1
        self.first_step = step
        self._sent = {}
        self._last_step = step - 1

    def points(self, record: dict[str, Any]) -> list[Point]:
        """Return the points of the next record that are to be sent; none if it is no record of a step."""
        place = place_of(record)
        if place is None or place[1] < self._attempt:  # a worker of an abandoned attempt may write after a later one
            return []
        step, self._attempt = place
        moment = as_time(record.get("time")) or 0.0
        self.last_time = moment or self.last_time
        found = []
        for name, value in record.items():
            if name in NO_VALUES:
                continue
            number = recorded_number(value)
            if number is not None and self._sent.setdefault(name, StepSet()).add(step):
                found.append(Point(name, step, number, moment))
        if is_own(record):  # an event may belong to a step of an earlier attempt
            self._last_step = max(self._last_step, step)
            for name, number in self._due(self._attempt, moment):
                if self._sent.setdefault(name, StepSet()).add(step):
                    found.append(Point(name, step, number, moment))
        return found


@dataclass(frozen=True)
class Block:
    """Whole lines of the file, from one place to another."""

    start: int
    end: int
    records: tuple[dict[str, Any], ...]
    places: tuple[int, ...]
    """Where each record's line begins."""


class Tail:
    """Reads the whole lines of a growing file from any place."""

    def __init__(self, run: Path) -> None:
        self._path = run / FILE_NAME

    def reaches(self, place: int) -> bool:
        """Return whether a place is still the end of a line; it is not in a file that was cut, even if it has grown."""
        if place == 0:
            return True
        try:
            with open_regular(self._path) as file:
                file.seek(place - 1)
                return file.read(1) == b"\n"
        except FileNotFoundError:
            return False

    def blocks(self, start: int, end: int | None = None) -> Iterator[Block]:
        """Yield blocks from a place to another, or to the end of the last whole line.

        Raises:
            OSError: the file cannot be read; a missing one has no blocks.
        """
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            while end is None or start < end:
                most = LINE_BYTES if end is None else end - start
                data = whole_lines(file, start, BATCH_BYTES, most)
                if not data:
                    return
                yield _block(start, data)
                start += len(data)


def _block(start: int, data: bytes) -> Block:
    records = []
    places = []
    place = start
    for line in data.split(b"\n"):
        for record in parse_json_lines([line]):
            records.append(record)
            places.append(place)
        place += len(line) + 1
    return Block(start, start + len(data), tuple(records), tuple(places))

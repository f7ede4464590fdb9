"""Notices that a machine will be taken away, and the board on which whoever hears one puts it up for the workers.

The board is `notices.jsonl` in an attempt's folder: one line per notice, only ever appended to. A file needs neither a
process id nor a signal handler, so it does not matter who watches and who trains, and a worker that starts late still
reads it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from headway.core.files import append_json_line
from headway.core.foreign import parse_json_lines
from headway.core.machine import host_name

BOARD_FILE = "notices.jsonl"
SIGNAL_KEY = "signal"
"""`Notice.key` of a signal that a worker was sent; its name is in `what`."""


@dataclass(frozen=True)
class Notice:
    """What somebody has said about the time that is left to a machine."""

    source: str
    """Who says it: aws, gcp, azure, slurm, kubernetes, signal."""
    what: str
    """In words."""
    wish: Literal["stop", "save"] = "stop"
    """What is to be done: save and stop, or save only."""
    deadline: float | None = None
    """When the machine goes, in Unix seconds; None when that was not said."""
    key: str = ""
    """What the source calls it, for its answer."""
    seen: float = field(default_factory=time.time, compare=False)
    """When it was heard, in Unix seconds."""
    host: str = field(default_factory=host_name, compare=False)

    def __str__(self) -> str:
        return f"{self.source}: {self.what}" + (f" at {clock_time(self.deadline)}" if self.deadline else "")


def clock_time(unix_seconds: float) -> str:
    """The time of day here."""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%H:%M:%S")


def post(attempt: Path, notice: Notice) -> None:
    """Put a notice on the board of an attempt's folder.

    Raises:
        OSError: it cannot be written.
    """
    append_json_line(attempt / BOARD_FILE, asdict(notice))


class Board:
    """The board of one attempt, as a worker reads it.

    Args:
        attempt: The attempt's folder.
        every_seconds: Look at the file at most so often; in between the answer is the last one.
    """

    def __init__(self, attempt: Path, every_seconds: float = 1.0) -> None:
        self._path, self._every = attempt / BOARD_FILE, every_seconds
        self._next_look, self._read = 0.0, 0
        self._found: list[Notice] = []

    def notices(self, now: bool = False) -> Sequence[Notice]:
        """All notices so far, by the time they were put up; `now` looks whether or not it is time."""
        if now or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._every
            with suppress(OSError):  # of a network file system that is away: the next look tells
                self._look()
        return self._found

    def _look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            # What has no end yet is still being written.
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole)
        for record in parse_json_lines(whole.splitlines()):
            try:
                self._found.append(Notice(**record))
            except TypeError:
                continue


def posted(attempt: Path) -> list[dict[str, Any]]:
    """The notices of an attempt as its record keeps them."""
    return [asdict(notice) for notice in Board(attempt).notices()]

"""Preemption notices, and the board on which they are posted for the workers.

The board is `notices.jsonl` in an attempt's folder: one line per notice, only ever appended to. A file needs
neither a process id nor a signal handler. So any process may watch for notices, and a worker that starts late still
reads them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import parse_json_lines
from headway.core.machine.system import host_name

BOARD_FILE = "notices.jsonl"
BUDGET_SOURCE = "budget"
"""`Notice.source` of a budget that is reached."""
SIGNAL_KEY = "signal"
"""`Notice.key` of a signal that a worker received; its name is in `what`."""

CANCEL_KEY = "cancel"
"""`Notice.key` of a request that the run save, and not be started again."""


@dataclass(frozen=True)
class Notice:
    """A notice about the time that is left until a machine is taken away."""

    source: str
    """Where it comes from: aws, gcp, azure, slurm, kubernetes, budget, spot, signal."""
    what: str
    """Description of the event."""
    wish: Literal["stop", "save"] = "stop"
    """The action it asks for: save and stop, or save only."""
    deadline: float | None = None
    """When the machine is taken away, in Unix seconds; None when unknown."""
    key: str = ""
    """Identifier that the source gave it, needed to acknowledge it."""
    seen: float = field(default_factory=time.time, compare=False)
    """When it was received, in Unix seconds."""
    host: str = field(default_factory=host_name, compare=False)

    def __str__(self) -> str:
        return f"{self.source}: {self.what}" + (f" at {clock_time(self.deadline)}" if self.deadline else "")


def clock_time(unix_seconds: float) -> str:
    """Format the local time of day."""
    return datetime.fromtimestamp(unix_seconds).astimezone().strftime("%H:%M:%S")


def post(attempt: Path, notice: Notice) -> None:
    """Post a notice on the board of an attempt.

    Raises:
        OSError: it cannot be written.
    """
    append_json_line(attempt / BOARD_FILE, asdict(notice))


class Board:
    """The board of one attempt, as a worker reads it.

    Args:
        attempt: The attempt's folder.
        every_seconds: Least time between two reads of the file; calls in between return the last result.
    """

    def __init__(self, attempt: Path, every_seconds: float = 1.0) -> None:
        self._path = attempt / BOARD_FILE
        self._every = every_seconds
        self._next_look = 0.0
        self._read = 0
        self._found: list[Notice] = []

    def notices(self, now: bool = False) -> Sequence[Notice]:
        """Return all notices so far in the order in which they were posted; `now` forces a read."""
        if now or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._every
            with suppress(OSError):  # a network file system may be away; the next read will tell
                self._look()
        return self._found

    def _look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            # A line without its end is still being written.
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole)
        for record in parse_json_lines(whole.splitlines()):
            try:
                self._found.append(Notice(**record))
            except TypeError:
                continue


def posted(attempt: Path) -> list[dict[str, Any]]:
    """Return the notices of an attempt in the form of its record."""
    return [asdict(notice) for notice in Board(attempt).notices()]

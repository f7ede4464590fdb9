"""What is known of an attempt's workers from outside, also of those that have not begun."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.heartbeat import Reading, read_heartbeat, why_unreadable
from headway.core.process_table import ProcessState, children_of, process_state, what_it_does
from headway.supervisor.restart_policy import Ending

AGAIN = "run the same command again: it goes on from the newest checkpoint"


@dataclass
class WorkersSeen:
    """The last signs of life and states of so many workers, by rank and in the ranks' order."""

    count: int
    readings: dict[int, Reading] = field(default_factory=dict)
    states: dict[int, ProcessState | None] = field(default_factory=dict)
    _pages: dict[int, int] = field(default_factory=dict)

    @property
    def alive(self) -> list[int]:
        """Process numbers."""
        found = (self.readings[rank].pid for rank, state in self.states.items() if state is not None)
        return [pid for pid in found if pid > 1]

    @property
    def missing(self) -> list[int]:
        """Those that have not begun."""
        return [rank for rank in range(self.count) if rank not in self.readings]

    def look(self, folder: Path) -> None:
        """Once more, at all of them; their pages are in the attempt's folder."""
        for rank in range(self.count):
            with suppress(OSError):  # it has not begun yet
                if rank not in self._pages:
                    # Kept open: what a worker did last is asked for when it is gone, or its disk is.
                    self._pages[rank] = os.open(folder / f"heartbeat-{rank}", os.O_RDONLY)
            reading = read_heartbeat(self._pages[rank]) if rank in self._pages else None
            if reading is not None:
                self.readings[rank] = reading
                self.states[rank] = process_state(reading.pid)
        # They begin in any order, and are named in one.
        self.readings, self.states = dict(sorted(self.readings.items())), dict(sorted(self.states.items()))

    def close(self) -> None:
        """Let go of their pages; what was seen stays."""
        for page in self._pages.values():
            os.close(page)
        self._pages.clear()

    def late(self, seconds: float, leader: int, has_begun: bool) -> str:
        """What to say of workers that give no sign of life yet, with what their processes do.

        Args:
            seconds: Since they were to begin.
            leader: The number of the attempt's first process: the worker, or what starts several.
            has_begun: It has looked at the run and its data; before that there is no other process.
        """
        known = {reading.pid for reading in self.readings.values()}
        suspects = [pid for pid in children_of(leader) if pid not in known] if has_begun and self.count > 1 else []
        doing = ", ".join(f"process {pid} {what_it_does(pid)}" for pid in suspects or [leader])
        who = _named(self.missing) if has_begun else "the attempt's first process"
        still = "gave no sign of life yet" if has_begun else "is not ready yet"
        return f"{who} {still}, {seconds:.0f} s after the start: {doing}"

    def not_begun(self, seconds: float, folder: Path | None) -> Ending:
        """The ending of an attempt that is waited for no longer.

        Args:
            seconds: How long it was.
            folder: The attempt's, if there is one.
        """
        what = f"{_named(self.missing)} did not begin within {seconds:.0f} s"
        if folder is not None:
            what += why_unreadable(folder / f"heartbeat-{self.missing[0]}")
        return Ending("hung", what, 1, fix=AGAIN, rank=self.missing[0])


def _named(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

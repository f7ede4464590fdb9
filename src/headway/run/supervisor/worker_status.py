"""The status of an attempt's workers as seen from outside, including those that have not begun."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.coordination.heartbeat import Reading, read_heartbeat, why_unreadable
from headway.core.process.table import DEAD, STOPPED, ProcessState, children_of, process_state, what_it_does
from headway.run.supervisor.restart_policy import AttemptOutcome

AGAIN = "run the same command again: it continues from the newest checkpoint"


@dataclass
class WorkerStatuses:
    """The last heartbeats and process states of an attempt's workers, in the order of ranks."""

    count: int
    here: range | None = None
    """Ranks of the workers of this machine; None for all. Other machines send what theirs do (`add`)."""
    readings: dict[int, Reading] = field(default_factory=dict)
    states: dict[int, ProcessState | None] = field(default_factory=dict)
    _pages: dict[int, int] = field(default_factory=dict)

    @property
    def alive(self) -> dict[int, int]:
        """Process numbers of the workers of this machine that are alive, by rank."""
        living = [rank for rank, state in self.states.items() if state is not None and state.state != DEAD]
        return {rank: pid for rank in living if rank in self._here and (pid := self.readings[rank].pid) > 1}

    @property
    def missing(self) -> list[int]:
        """Ranks of the workers that have not begun."""
        return [rank for rank in range(self.count) if rank not in self.readings]

    def look(self, folder: Path) -> None:
        """Read the heartbeats and states of this machine anew; the pages are in the attempt's folder."""
        for rank in self._here:
            with suppress(OSError):  # it has not begun yet
                if rank not in self._pages:
                    # Kept open: the last heartbeat is needed after the worker, or its disk, is gone.
                    self._pages[rank] = os.open(folder / f"heartbeat-{rank}", os.O_RDONLY)
            reading = read_heartbeat(self._pages[rank]) if rank in self._pages else None
            if reading is not None:
                self.readings[rank] = reading
                self.states[rank] = process_state(reading.pid)
        self._sort()

    @property
    def _here(self) -> range:
        return range(self.count) if self.here is None else self.here

    @property
    def sessions(self) -> set[int]:
        """Process numbers of the workers of this machine, dead or alive; each leads a session."""
        return {reading.pid for rank, reading in self.readings.items() if rank in self._here}

    def stack_files(self, folder: Path, ranks: Iterable[int]) -> tuple[dict[int, Path], dict[int, Path]]:
        """Return where living workers of this machine write their stacks, by process number.

        Those that run come first, then those that are stopped.
        """
        going = dict[int, Path]()
        stopped = dict[int, Path]()
        for rank in ranks:
            state = self.states.get(rank)
            if state is not None and state.state != DEAD and rank in self._here:
                files = stopped if state.state == STOPPED else going
                files[self.readings[rank].pid] = folder / f"stack-{rank}.txt"
        return going, stopped

    def add(self, readings: Mapping[int, Reading], states: Mapping[int, ProcessState | None]) -> None:
        """Add what other machines have sent about their workers."""
        self.readings.update(readings)
        self.states.update(states)
        self._sort()

    def _sort(self) -> None:
        # Workers begin in any order, but are listed by rank.
        self.readings, self.states = dict(sorted(self.readings.items())), dict(sorted(self.states.items()))

    def close(self) -> None:
        """Release the pages; the last readings stay."""
        for page in self._pages.values():
            os.close(page)
        self._pages.clear()

    def late(self, seconds: float, first: int, has_begun: bool) -> str:
        """Describe the workers that give no sign of life yet, and what their processes do.

        Args:
            seconds: Time since the start.
            first: Number of the attempt process: the only worker, or the agent of several.
            has_begun: Whether it has checked the run and its data; before that there is no other process.
        """
        known = {reading.pid for reading in self.readings.values()}
        suspects = [pid for pid in children_of(first) if pid not in known] if has_begun and self.count > 1 else []
        doing = ", ".join(f"process {pid} {what_it_does(pid)}" for pid in suspects or [first])
        late = _worker_names(self.missing) if has_begun else "the attempt's first process"
        still = "gave no sign of life yet" if has_begun else "is not ready yet"
        return f"{late} {still}, {seconds:.0f} s after the start: {doing}"

    def not_begun(self, seconds: float, folder: Path | None) -> AttemptOutcome:
        """Return the outcome of an attempt whose workers did not begin in time.

        Args:
            seconds: How long the supervisor has waited.
            folder: The attempt's folder, if there is one.
        """
        what = f"{_worker_names(self.missing)} did not begin within {seconds:.0f} s"
        if folder is not None:
            what += why_unreadable(folder / f"heartbeat-{self.missing[0]}")
        return AttemptOutcome("hung", what, 1, fix=AGAIN, rank=self.missing[0])


def _worker_names(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

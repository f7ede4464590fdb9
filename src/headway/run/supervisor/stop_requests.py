"""What asks a command to stop: signals, on this machine or another one of the run, and `headway cancel`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

from headway.core.errors import Preempted
from headway.core.startup.early_stop import take_early_signals
from headway.run.directory.cancel import check_not_cancelled
from headway.run.supervisor.machines.run_machines import RunMachines

#: Time between looks for a request to cancel the run; while an attempt runs, its workers look.
_ASK_SECONDS = 1.0


class StopRequests:
    """The stop signals that a command has received, those from before this was made included.

    Args:
        run: The run directory.
        machines: The other machines of the run; None for a run on one.
    """

    def __init__(self, run: Path, machines: RunMachines | None) -> None:
        self._run = run
        self._machines = machines
        self._asked_at = 0.0
        self.signals: list[int] = []
        for number in take_early_signals():
            self.record(number, None)

    def record(self, number: int, frame: FrameType | None) -> None:
        """Record a signal: a handler of signals."""
        if self._machines is None:
            self.signals.append(number)
        else:
            self._machines.add_signal(self.signals, number)

    def hear(self) -> list[int]:
        """Return the signals of all machines so far."""
        return self.signals if self._machines is None else self._machines.hear(self.signals)

    def check_not_cancelled(self) -> None:
        """Check that no process has cancelled the run, about once a second.

        Raises:
            Cancelled: it was cancelled.
        """
        now = time.monotonic()
        if now - self._asked_at >= _ASK_SECONDS:
            self._asked_at = now
            check_not_cancelled(self._run)

    def error(self, when: str) -> Preempted:
        """Return the error of a command that a signal stops while no attempt runs."""
        return Preempted(f"stopped by {self.name} {when}", fix="run the same command again")

    @property
    def name(self) -> str:
        """The name of the first signal."""
        return signal.Signals(self.signals[0]).name

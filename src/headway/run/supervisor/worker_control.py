"""What the supervisor does to the workers of an attempt: it passes signals on, asks for stacks, and kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from headway.core.process.tree import ask_for_stacks, file_size
from headway.run.supervisor.attempt_client import AttemptProcess
from headway.run.supervisor.machines.attempt_machines import AttemptMachines
from headway.run.supervisor.worker_status import WorkerStatuses

#: Asks workers to save and stop, so that the next attempt can have more of them.
GROW_SIGNAL = signal.SIGUSR1
#: How long stacks may take to be written.
_STACK_SECONDS = 2.0


class WorkerControl:
    """Acts on the workers of an attempt, on this machine and on the others.

    Args:
        workers: What is known of them.
        machines: The other machines that take part.
        signals: Signals to stop that have come, in order; more are added from outside.
    """

    def __init__(self, workers: WorkerStatuses, machines: AttemptMachines, signals: Sequence[int]) -> None:
        self._workers = workers
        self._machines = machines
        self._signals = signals
        self._passed_on = 0
        self.killed: set[int] = set()
        """Ranks of the workers of this machine that were killed by `kill`."""
        self.asked_to_grow = False
        """Whether workers were asked to stop for an attempt with more of them."""

    def look(self, folder: Path) -> None:
        """Take what is new of all workers; their heartbeats of this machine are in the attempt's folder."""
        self._workers.look(folder)
        self._workers.add(self._machines.statuses.readings, self._machines.statuses.states)

    def pass_signals_on(self, process: AttemptProcess, folder: Path | None) -> None:
        """Pass signals on to workers, which save and end with exit code 75.

        Args:
            process: The attempt's first process on this machine.
            folder: The attempt's folder, once it has begun.
        """
        several = self._workers.count > 1
        for number in self._signals[self._passed_on :]:
            self._passed_on += 1
            if several and not self._workers.alive and folder is not None:
                self.look(folder)  # they may have begun since the last look
            targets = list(self._workers.alive.values()) if several else [process.pid]
            if not self._workers.readings and not targets and process.poll() is None:
                # An agent whose workers have not begun has nothing to save. Once they are gone, it reports why.
                targets = [process.pid]
                number = signal.SIGKILL
            _send(number, targets)
            self._machines.signal(number)

    def ask_to_grow(self) -> None:
        """Ask workers to save and stop at the next step."""
        self.asked_to_grow = True
        self._machines.signal(GROW_SIGNAL)
        _send(GROW_SIGNAL, self._workers.alive.values())

    def kill(self, folder: Path) -> None:
        """Kill the remaining workers, so that the agent reports at once instead of waiting half a minute for them."""
        self._machines.signal(signal.SIGKILL)
        self.look(folder)  # those that have died by now are not killed here
        self.killed.update(self._workers.alive)
        _send(signal.SIGKILL, self._workers.alive.values())

    def write_stacks(
        self, folder: Path, ranks: Sequence[int], wake: bool = False, seconds: float = _STACK_SECONDS
    ) -> None:
        """Have workers write their stacks to `stack-<rank>.txt`; stopped ones are continued for that if `wake`."""
        self._machines.write_stacks(ranks, wake)
        going, stopped = self._workers.stack_files(folder, ranks)
        ask_for_stacks(going, seconds)
        if wake:
            ask_for_stacks(stopped, _STACK_SECONDS, stopped=True)

    def are_stacks_missing(self, folder: Path) -> bool:
        """Return whether a living worker of this machine has yet to write its stack; it may wait for a processor."""
        files, _ = self._workers.stack_files(folder, self._workers.readings)
        return any(file_size(path) == 0 for path in files.values())


def _send(number: int, processes: Iterable[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

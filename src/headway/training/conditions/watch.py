"""Background readings of conditions, which never delay a step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from headway.core.console import warning
from headway.core.machine.system import Machine
from headway.training.conditions.clock import ClockJumps
from headway.training.conditions.condition import Condition
from headway.training.conditions.disk import Disk
from headway.training.conditions.gpus import Gpus
from headway.training.conditions.memory import Memory
from headway.training.conditions.processors import Processors
from headway.training.conditions.system import SystemRecord
from headway.training.job import Callback, Job


def conditions(
    checkpoints: Path, machine: Machine | None = None, run: int | None = None, attempt: Path | None = None
) -> dict[str, Condition]:
    """Return the conditions to watch on each machine of a run.

    Args:
        checkpoints: The folder of checkpoints.
        machine: This machine if not given.
        run: The process that the run's processes here descend from; this one if not given.
        attempt: The folder of the attempt, in which each machine records its readings; none are recorded without it.
    """
    machine = machine or Machine()
    gpus = Gpus(machine)
    watched: dict[str, Condition] = {
        "disk": Disk(checkpoints, machine),
        "clock": ClockJumps(),
        "memory": Memory(machine),
        "gpus": gpus,
        "processors": Processors(machine, run),
    }
    # After the GPUs, whose report it records.
    return watched if attempt is None else {**watched, "system": SystemRecord(attempt, checkpoints, machine, gpus)}


class ConditionWatch(Callback):
    """Reads conditions every so many seconds; warns of each fault once, and adds metrics to the next step.

    Args:
        conditions: Conditions by name.
        every_seconds: Time between readings.
    """

    def __init__(self, conditions: Mapping[str, Condition], every_seconds: float) -> None:
        self._conditions = conditions
        self._every = every_seconds
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()

    def on_start(self, job: Job) -> None:
        """Start reading."""
        self._closing.clear()
        threading.Thread(target=self._work, name="headway-conditions", daemon=True).start()

    def on_step(self, job: Job, step: int, metrics: dict[str, float]) -> None:
        """Add what was read since the last step."""
        if self._metrics:
            with self._lock:
                metrics.update(self._metrics)
                self._metrics = {}

    def on_end(self, job: Job) -> None:
        """Stop reading, without waiting for a reading that is in progress."""
        self._closing.set()

    def look(self) -> None:
        """Read all conditions once."""
        for name, condition in self._conditions.items():
            try:
                reading = condition.read()
            except Exception as error:  # a failed reading must not disturb training
                self._warn({(name, "failed"): f"{name} cannot be watched: {type(error).__name__}: {error}"}, name)
                continue
            with self._lock:
                self._metrics.update(reading.metrics)
            self._warn({(name, about): text for about, text in reading.warnings.items()}, name)

    def _warn(self, found: Mapping[tuple[str, str], str], name: str) -> None:
        for key, text in found.items():
            if key not in self._warned and not self._closing.is_set():
                warning(text)
        self._warned = {key for key in self._warned if key[0] != name} | set(found)

    def _work(self) -> None:
        while not self._closing.is_set():
            self.look()
            self._closing.wait(self._every)

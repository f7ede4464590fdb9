"""The record of each machine's readings: no condition that may be bad, but read at the same times."""

from __future__ import annotations

from pathlib import Path

from headway.core.machine.system import Machine
from headway.telemetry.system import SystemReader, gpu_metrics, record_readings
from headway.training.conditions.condition import Reading
from headway.training.conditions.gpus import Gpus


class SystemRecord:
    """Appends processor, memory, disks, network and GPUs of this machine to its file in the attempt's folder.

    They are no metrics of a step: every machine has its own, and readers label them by machine.

    Args:
        attempt: The folder of the attempt.
        checkpoints: The folder of checkpoints, whose file system counts.
        machine: The machine.
        gpus: Its GPUs, read before.
    """

    def __init__(self, attempt: Path, checkpoints: Path, machine: Machine, gpus: Gpus) -> None:
        self._attempt = attempt
        self._gpus = gpus
        self._reader = SystemReader(checkpoints if checkpoints.is_dir() else checkpoints.parent, machine)

    def read(self) -> Reading:
        """Append what is read now; nothing goes into the step's record."""
        metrics = self._reader.read()
        if self._gpus.driver is not None:
            metrics.update(gpu_metrics(self._gpus.driver, self._gpus.new_xids))
        record_readings(self._attempt, metrics)
        return Reading()

"""The GPU condition: memory errors, heat, and Xid messages in the kernel's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from headway.core.machine.system import Machine, Output
from headway.telemetry.gpus import Driver, Gpu, read_driver, read_xids
from headway.training.conditions.condition import Reading


class Gpus:
    """The NVIDIA GPUs of a machine. Only faults since the run began count; `headway doctor` reports older ones.

    Args:
        machine: The machine that has the GPUs.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._errors: dict[int, int] | None = None
        self._xids: Counter[tuple[str, int]] | None = None
        self.driver: Driver | None = None
        """The last report of the driver."""
        self.new_xids: Counter[tuple[str, int]] = Counter()
        """Xid messages since the run began, by PCI address and number."""

    def read(self) -> Reading:
        """Report what the driver and the kernel say; nothing where there is no GPU."""
        self.driver = driver = read_driver(self._machine)
        if not driver.gpus:
            if self._errors is None:  # it has never listed one
                return Reading()
            return Reading({}, {"driver": _lost(driver.output), **dict(self._of_kernel())})
        hottest = max(
            (gpu.temperature_celsius for gpu in driver.gpus if gpu.temperature_celsius is not None), default=None
        )
        metrics = {} if hottest is None else {"health/gpu_temperature_celsius": float(hottest)}
        return Reading(metrics, {**dict(self._of_gpus(driver)), **dict(self._of_kernel())})

    def _of_gpus(self, driver: Driver) -> Iterator[tuple[str, str]]:
        errors = {gpu.index: gpu.uncorrected_errors for gpu in driver.gpus}
        before = self._errors or errors
        self._errors = self._errors or errors
        for gpu in driver.gpus:
            more = gpu.uncorrected_errors - before.get(gpu.index, 0)
            if more > 0:
                yield (
                    f"ecc {gpu.index} {more}",
                    f"GPU {gpu.index}: {more} uncorrected memory errors since the run began",
                )
            if gpu.rows_failed:
                yield f"rows {gpu.index}", f"GPU {gpu.index}: broken memory could not be replaced; replace the GPU"
            yield from _heat(gpu)

    def _of_kernel(self) -> Iterator[tuple[str, str]]:
        xids = Counter(read_xids(self._machine))
        if self._xids is None:
            self._xids = xids
        self.new_xids = xids - self._xids
        for (device, number), count in self.new_xids.items():
            yield f"xid {device} {number} {count}", f"the kernel reports Xid {number} of GPU {device} (headway doctor)"


def _lost(output: Output) -> str:
    """Explain why nvidia-smi no longer lists a GPU."""
    if output.state == "silent":
        return "nvidia-smi no longer answers: a GPU or its driver hangs"
    said = next(
        (line.strip() for line in output.text.splitlines() if line.strip() and "<" not in line), "no reason given"
    )
    return f"nvidia-smi no longer lists a GPU: {said}; a GPU that fell off the bus causes this (headway doctor)"


def _heat(gpu: Gpu) -> Iterator[tuple[str, str]]:
    hot = [text for text in gpu.throttles if "hot" in text]
    if hot:
        at = "" if gpu.temperature_celsius is None else f" at {gpu.temperature_celsius} degrees"
        yield f"heat {gpu.index}", f"GPU {gpu.index} is slowed down{at}: {'; '.join(hot)}; check its cooling"

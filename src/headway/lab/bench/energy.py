"""Energy in joules and the use of GPUs, as the hardware counts them: GPUs through their driver, processors by RAPL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.core.machine.system import Machine

RAPL = Path("/sys/class/powercap")


class Counter(Protocol):
    """Counts joules."""

    source: str

    def joules(self) -> float:
        """Return the joules since the last call."""
        ...


def open_counter(
    device_type: str, index: int, counts_processors: bool, machine: Machine | None = None
) -> Counter | None:
    """Open the energy counter of a worker's device; None if there is none, or another worker reads it.

    Args:
        device_type: "cuda" or "cpu".
        index: Index of the GPU among those that this process sees.
        counts_processors: Whether this worker is the one of its machine that reads the processors.
    """
    if device_type == "cuda":
        return _gpu(index)
    return _processors(machine or Machine()) if counts_processors else None


@dataclass
class _Gpu:
    nvml: Any
    handle: Any
    last: float
    source: str = "the driver of the GPUs (NVML)"

    def joules(self) -> float:
        before = self.last
        self.last = self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000
        return self.last - before


def _gpu(index: int) -> Counter | None:
    try:
        nvml, handle = _find_gpu(index)
        return _Gpu(nvml, handle, nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
    except Exception:  # not installed, not NVIDIA's, too old or not allowed: unknown
        return None


def _find_gpu(index: int) -> tuple[Any, Any]:
    """Find a GPU by its physical identity, since `CUDA_VISIBLE_DEVICES` may have renumbered it."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


@dataclass
class GpuUtilization:
    """Samples how busy a GPU is, on a thread, from `start` to `stop`."""

    read: Callable[[], float]
    """Returns the share of the driver's last sample period in which a kernel ran."""
    samples: list[float] = field(default_factory=list)
    every_seconds: float = 0.1
    """No driver says it anew more often (NVML: every 1/6 s to 1 s)."""
    _stops: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling."""
        self._thread = threading.Thread(target=self._run, name="headway-gpu-utilization", daemon=True)
        self._thread.start()

    def stop(self) -> list[float] | None:
        """Stop, and return the samples; None if the driver does not say."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()
        return self.samples or None

    def _run(self) -> None:
        while not self._stops.wait(self.every_seconds):
            try:
                self.samples.append(self.read())
            except Exception:  # as of a part of a GPU (MIG)
                return


def open_gpu_utilization(device_type: str, index: int) -> GpuUtilization | None:
    """Return what samples the use of a worker's GPU; None on the CPU, or if its driver cannot be asked.

    Args:
        device_type: "cuda" or "cpu".
        index: Index of the GPU among those that this process sees.
    """
    if device_type != "cuda":
        return None
    try:
        nvml, handle = _find_gpu(index)
    except Exception:  # as in `_gpu`
        return None
    return GpuUtilization(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)


@dataclass
class _Processors:
    machine: Machine
    zones: list[tuple[str, int]]
    """Name of each package's zone, and the micro-joules at which its counter wraps around."""
    last: list[int]
    source: str = "the processors (RAPL), with everything that ran on them"

    def joules(self) -> float:
        now = _read(self.machine, self.zones)
        total = 0
        for (_, most), before, after in zip(self.zones, self.last, now, strict=True):
            total += after - before if after >= before else after - before + most
        self.last = now
        return total / 1e6


def _processors(machine: Machine) -> Counter | None:
    # intel-rapl:0 is a whole zone; intel-rapl:0:1 is a part of it. AMD's counters have the same names. A zone "psys"
    # counts the whole board, packages included.
    whole = [name for name in machine.names(RAPL) if name.startswith("intel-rapl:") and name.count(":") == 1]
    names = [name for name in whole if (machine.text(RAPL / name / "name") or "").startswith("package")]
    limits = [machine.number(RAPL / name / "max_energy_range_uj") for name in names]
    zones = [(name, most) for name, most in zip(names, limits, strict=True) if most is not None]
    if not zones or any(machine.number(RAPL / name / "energy_uj") is None for name, _ in zones):
        return None
    return _Processors(machine, zones, _read(machine, zones))


def _read(machine: Machine, zones: list[tuple[str, int]]) -> list[int]:
    return [machine.number(RAPL / name / "energy_uj") or 0 for name, _ in zones]

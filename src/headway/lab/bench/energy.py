"""Energy in joules as the hardware counts it: GPUs through their driver, processors through RAPL."""

from __future__ import annotations

from dataclasses import dataclass
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
        before, self.last = self.last, self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1000
        return self.last - before


def _gpu(index: int) -> Counter | None:
    """Find the GPU by its physical identity, since `CUDA_VISIBLE_DEVICES` may have renumbered it."""
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        return _Gpu(pynvml, handle, pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
    except Exception:  # not installed, not NVIDIA's, too old or not allowed: unknown
        return None


@dataclass
class _Processors:
    machine: Machine
    zones: list[tuple[str, int]]
    """Name of each package's zone, and the micro-joules at which its counter wraps around."""
    last: list[int]
    source: str = "the processors (RAPL), with everything that ran on them"

    def joules(self) -> float:
        now, total = _read(self.machine, self.zones), 0
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

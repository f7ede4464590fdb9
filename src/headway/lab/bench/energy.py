"""Energy in joules and the use of GPUs, as the hardware counts them: GPUs through their driver, processors by RAPL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from headway.core.machine.sampler import Sampler
from headway.core.machine.system import Machine

RAPL = Path("/sys/class/powercap")
#: No driver says anew how busy a GPU is more often (NVML: every 1/6 s to 1 s).
_UTILIZATION_SECONDS = 0.1


class Counter:
    """Counts joules.

    Args:
        source: What counts them.
        read: Returns the state of each counter of the hardware.
        limits: Where each of these begins anew.
        per_joule: Their units in a joule.
    """

    def __init__(self, source: str, read: Callable[[], list[int]], limits: Sequence[float], per_joule: float) -> None:
        self.source = source
        self._read = read
        self._limits = limits
        self._per_joule = per_joule
        self._last = read()

    def joules(self) -> float:
        """Return the joules since the last call."""
        now = self._read()
        total = 0.0
        for limit, before, after in zip(self._limits, self._last, now, strict=True):
            total += after - before if after >= before else after - before + limit
        self._last = now
        return total / self._per_joule


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


def _gpu(index: int) -> Counter | None:
    try:
        nvml, handle = _find_gpu(index)
        read = nvml.nvmlDeviceGetTotalEnergyConsumption
        return Counter("the driver of the GPUs (NVML)", lambda: [read(handle)], [inf], 1e3)
    except Exception:  # not installed, not NVIDIA's, too old or not allowed: unknown
        return None


def _find_gpu(index: int) -> tuple[Any, Any]:
    """Find a GPU by its physical identity, since `CUDA_VISIBLE_DEVICES` may have renumbered it."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def open_gpu_utilization(device_type: str, index: int) -> Sampler[float] | None:
    """Return what samples the share of time in which a kernel ran on a worker's GPU; None on the CPU, or if its driver
    cannot be asked.

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
    return Sampler(
        lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, _UTILIZATION_SECONDS, "headway-gpu-utilization"
    )


def _processors(machine: Machine) -> Counter | None:
    # intel-rapl:0 is a whole zone; intel-rapl:0:1 is a part of it. AMD's counters have the same names. A zone "psys"
    # counts the whole board, packages included.
    whole = [name for name in machine.names(RAPL) if name.startswith("intel-rapl:") and name.count(":") == 1]
    names = [name for name in whole if (machine.text(RAPL / name / "name") or "").startswith("package")]
    limits = {RAPL / name: machine.number(RAPL / name / "max_energy_range_uj") for name in names}
    zones = {zone: most for zone, most in limits.items() if most is not None}
    if not zones or any(machine.number(zone / "energy_uj") is None for zone in zones):
        return None
    source = "the processors (RAPL), with everything that ran on them"
    return Counter(source, lambda: [machine.number(zone / "energy_uj") or 0 for zone in zones], [*zones.values()], 1e6)

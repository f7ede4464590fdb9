"""Readings of machines: processor, memory, disks, network and GPUs, as lines of `system-<machine>.jsonl` in an attempt.

Each machine of a run appends to its own file, since lines of several machines in one file could mix on a shared file
system. A line has `time` and metrics of the catalogue.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from headway.core.files.atomic import append_json_line
from headway.core.files.foreign import parse_json_lines, read_end
from headway.core.machine.memory import host_memory
from headway.core.machine.system import Machine, host_name
from headway.telemetry.gpus import Driver
from headway.telemetry.metrics import recorded_number

_PREFIX = "system-"
_GIB = 2**30
#: The kernel counts in hundredths of a second: a share of less time than this says nothing.
_LEAST_SECONDS = 1.0
#: Size of a few lines, also of a machine with 16 GPUs.
_TAIL_BYTES = 32 * 1024


class SystemReader:
    """Reads the machine that it runs on.

    Args:
        folder: A folder on the file system whose space counts.
        machine: The machine.
    """

    def __init__(self, folder: Path, machine: Machine) -> None:
        self._folder = folder
        self._machine = machine
        self._busy, self._all = _processor_seconds()

    def read(self) -> dict[str, float]:
        """Return what can be read; the processor's share is of the time since the last reading."""
        return {name: value for name, value in self._read() if value is not None}

    def _read(self) -> Iterator[tuple[str, float | None]]:
        import psutil

        busy, everything = _processor_seconds()
        passed = everything - self._all
        if passed >= _LEAST_SECONDS:
            yield "system/cpu_share", min(1.0, max(0.0, (busy - self._busy) / passed))
            self._busy = busy
            self._all = everything
        memory = host_memory(self._machine)
        if memory is not None and memory.available_bytes is not None:
            yield "system/memory_used_gib", (memory.allowed_bytes - memory.available_bytes) / _GIB
            yield "system/memory_allowed_gib", memory.allowed_bytes / _GIB
        try:
            space = self._machine.space(self._folder)
            yield "system/disk_free_gib", space.free_bytes / _GIB
            yield "system/disk_total_gib", space.total_bytes / _GIB
        except OSError:
            pass
        disks = psutil.disk_io_counters()
        if disks is not None:  # there may be none in a container
            yield "system/disk_read_gib", disks.read_bytes / _GIB
            yield "system/disk_written_gib", disks.write_bytes / _GIB
        # Without the loopback device, over which processes of one machine talk.
        devices = [found for name, found in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        if devices:
            yield "system/network_received_gib", sum(found.bytes_recv for found in devices) / _GIB
            yield "system/network_sent_gib", sum(found.bytes_sent for found in devices) / _GIB


def _processor_seconds() -> tuple[float, float]:
    """Return the seconds that all processors were busy, and all seconds, since the machine started."""
    import psutil

    times = psutil.cpu_times()
    # `guest` is part of `user` already.
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return everything - times.idle - getattr(times, "iowait", 0.0), everything


def gpu_metrics(driver: Driver, xids: Mapping[tuple[str, int], int]) -> dict[str, float]:
    """Return the metrics of every GPU; what the driver does not report is absent.

    Args:
        driver: Its report.
        xids: Number of Xid messages by PCI address and number.
    """
    by_address = Counter[str]()
    for (address, _), count in xids.items():
        by_address[address.lower()] += count
    metrics: dict[str, float | None] = {}
    for gpu in driver.gpus:
        found = {
            f"gpu/utilization_share/{gpu.index}": _scaled(gpu.utilization_percent, 1 / 100),
            f"gpu/memory_used_gib/{gpu.index}": _scaled(gpu.memory_used_bytes, 1 / _GIB),
            f"gpu/memory_total_gib/{gpu.index}": _scaled(gpu.memory_bytes, 1 / _GIB),
            f"gpu/temperature_celsius/{gpu.index}": gpu.temperature_celsius,
            f"gpu/power_watts/{gpu.index}": gpu.power_watts,
            f"gpu/power_limit_watts/{gpu.index}": gpu.power_limit_watts,
            f"gpu/sm_clock_mhz/{gpu.index}": gpu.sm_clock_mhz,
            f"gpu/memory_clock_mhz/{gpu.index}": gpu.memory_clock_mhz,
            f"gpu/uncorrected_errors/{gpu.index}": gpu.uncorrected_errors if gpu.ecc else None,
            f"gpu/corrected_errors/{gpu.index}": gpu.corrected_errors if gpu.ecc else None,
            f"gpu/xid_errors/{gpu.index}": by_address[gpu.address] if gpu.address else None,
        }
        metrics.update(found)
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def record_readings(attempt: Path, metrics: Mapping[str, float]) -> None:
    """Append the readings of this machine.

    Raises:
        OSError: the file cannot be written.
    """
    machine = re.sub(r"[^A-Za-z0-9._-]", "_", host_name())
    append_json_line(attempt / f"{_PREFIX}{machine}.jsonl", {"time": round(time.time(), 3), **metrics})


def newest_readings(attempt: Path) -> dict[str, dict[str, float]]:
    """Return the last readings of every machine of an attempt, by the machine's name; `time` is when they were made."""
    lines = ((machine_of(path), _last_line(path)) for path in reading_files(attempt))
    return {machine: line for machine, line in lines if line}


def reading_files(attempt: Path) -> list[Path]:
    """Return the files of readings of an attempt, one for each machine."""
    return sorted(attempt.glob(f"{_PREFIX}*.jsonl"))


def machine_of(path: Path) -> str:
    """Return the machine whose readings are in a file."""
    return path.name.removeprefix(_PREFIX).removesuffix(".jsonl")


def _last_line(path: Path) -> dict[str, float]:
    try:
        end, _ = read_end(path, _TAIL_BYTES)
    except OSError:
        return {}
    records = list(parse_json_lines(end.split(b"\n")[-3:]))
    newest = records[-1] if records else {}
    return {name: number for name, value in newest.items() if (number := recorded_number(value)) is not None}

"""Processors: how many the machine has and how many this process may use, which is fewer in a container."""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import dataclass

from headway.core.machine.cgroups import Limit, cpu_limit
from headway.core.machine.system import Machine, cpu_list


def usable_cores() -> int:
    """Return how many threads of this process can run at the same time, at least one."""
    machine = Machine()
    if not machine.exists("/proc/self/status"):  # not Linux
        return os.cpu_count() or 1
    return read_cores(machine).usable


@dataclass(frozen=True)
class Cores:
    """How many processors there are, and how many this process may use."""

    seen: int
    """Logical processors of the machine."""
    allowed: int
    """Processors on which the scheduler may run this process."""
    limit: Limit | None

    @property
    def usable(self) -> int:
        """Threads that can run at the same time, at least one."""
        return max(1, min(self.allowed, math.floor(self.limit.value) if self.limit else self.allowed))


def read_cores(machine: Machine) -> Cores:
    """Count the processors of a machine and those that this process may use."""
    seen = len(cpu_list(machine.text("/sys/devices/system/cpu/online"))) or len(read_processors(machine)) or 1
    allowed = len(allowed_processors(machine)) or seen
    return Cores(seen, min(allowed, seen), cpu_limit(machine))


def allowed_processors(machine: Machine) -> list[int]:
    """Return the numbers of the processors on which this process may run; none where the machine does not show them."""
    found = re.search(r"^Cpus_allowed_list:(.*)$", machine.text("/proc/self/status") or "", re.MULTILINE)
    return cpu_list(found[1].strip()) if found else []


def read_processors(machine: Machine) -> list[dict[str, str]]:
    """Return each processor's entry in /proc/cpuinfo."""
    entries = (machine.text("/proc/cpuinfo") or "").split("\n\n")
    pairs = ([line.partition(":") for line in entry.splitlines()] for entry in entries if entry.strip())
    found = [{key.strip(): value.strip() for key, _, value in lines} for lines in pairs]
    return [entry for entry in found if "processor" in entry]


@functools.cache
def has_bf16_tiles(machine: Machine | None = None) -> bool:
    """Return whether the processors multiply bf16 in tiles (AMX), many times as fast as fp32."""
    processors = read_processors(machine or Machine())
    return bool(processors) and "amx_bf16" in processors[0].get("flags", "").split()

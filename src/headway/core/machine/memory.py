"""Main memory: how much a process may use, and how much is left."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.core.machine.cgroups import memory_limit, memory_used_bytes
from headway.core.machine.system import Machine


@dataclass(frozen=True)
class HostMemory:
    """Bytes of main memory."""

    total_bytes: int
    """Memory of the machine."""
    allowed_bytes: int
    """Memory that this process may use: less in a container or a job with a limit."""
    available_bytes: int | None
    """What is left of that; None when unknown."""
    where: str
    """The file that sets the limit."""


def meminfo(machine: Machine) -> dict[str, int]:
    """Return the bytes of each entry of /proc/meminfo; empty where there is no such file."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", machine.text("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def host_memory(machine: Machine) -> HostMemory | None:
    """Return main memory within the limits of control groups; None where the system does not report it."""
    facts = meminfo(machine)
    total = facts.get("MemTotal")
    available = facts.get("MemAvailable")
    if total is None:
        return None
    limit = memory_limit(machine)
    used = memory_used_bytes(machine)
    if limit is None or limit.value >= total:
        return HostMemory(total, total, available, "/proc/meminfo")
    allowed = int(limit.value)
    free = None if used is None else max(0, allowed - used)
    left = free if available is None or free is None else min(available, free)
    return HostMemory(total, allowed, left, limit.where)


def allowed_bytes(machine: Machine) -> int:
    """Return the bytes of main memory that this machine, container or job allows."""
    found = host_memory(machine)
    if found is not None:
        return found.allowed_bytes
    import psutil  # only needed outside Linux

    return int(psutil.virtual_memory().total)

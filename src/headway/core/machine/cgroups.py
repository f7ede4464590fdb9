"""Limits that a container or scheduler sets for this process: Linux control groups, versions 2 and 1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headway.core.machine.system import Machine

#: Version 1 says "no limit" with the largest multiple of a page in 63 bits, or about that.
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True)
class Limit:
    """A limit and the file that sets it."""

    value: float
    where: str


def cpu_limit(machine: Machine) -> Limit | None:
    """Return how many processors' worth of time this process may use; None without a limit."""
    return min((limit for limit in _cpu_limits(machine)), key=lambda limit: limit.value, default=None)


def memory_limit(machine: Machine) -> Limit | None:
    """Return how many bytes of memory this process may use; None without a limit."""
    return min((limit for limit in _memory_limits(machine)), key=lambda limit: limit.value, default=None)


def memory_used_bytes(machine: Machine) -> int | None:
    """Return the bytes in use, without reclaimable cache, of the group that sets the memory limit; None without one."""
    limit = memory_limit(machine)
    if limit is None:
        return None
    folder, _, name = limit.where.rpartition("/")
    used = machine.number(f"{folder}/{'memory.current' if name == 'memory.max' else 'memory.usage_in_bytes'}")
    if used is None:
        return None
    # The kernel counts inactive pages of files as used, but reclaims them when a process needs memory.
    idle = "inactive_file" if name == "memory.max" else "total_inactive_file"
    cached = re.search(rf"^{idle} (\d+)$", machine.text(f"{folder}/memory.stat") or "", re.MULTILINE)
    return max(0, used - int(cached[1])) if cached else used


def cpu_throttled_seconds(machine: Machine) -> float | None:
    """Return how long the group that sets the limit on processors was kept from running by it; None without one."""
    limit = cpu_limit(machine)
    if limit is None:
        return None
    counters = machine.text(f"{limit.where.rpartition('/')[0]}/cpu.stat") or ""
    # Version 2 counts microseconds, version 1 nanoseconds.
    for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        if found := re.search(rf"^{name} (\d+)$", counters, re.MULTILINE):
            return int(found[1]) * unit
    return None


def threads_left(machine: Machine) -> int | None:
    """Return how many more threads the processes of this group may start; None without a limit."""
    left = []
    for folder in (*_folders(machine, ""), *_folders(machine, "pids")):
        most = machine.number(f"{folder}/pids.max")
        now = machine.number(f"{folder}/pids.current")
        if most is not None and now is not None:
            left.append(max(0, most - now))
    return min(left, default=None)


def _cpu_limits(machine: Machine) -> Iterator[Limit]:
    for folder in _folders(machine, ""):
        quota, _, period = (machine.text(f"{folder}/cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield Limit(int(quota) / int(period), f"{folder}/cpu.max")
    for folder in _folders(machine, "cpu"):
        time, each = (machine.number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if time is not None and each and time > 0:
            yield Limit(time / each, f"{folder}/cpu.cfs_quota_us")


def _memory_limits(machine: Machine) -> Iterator[Limit]:
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _folders(machine, controller):
            limit = machine.number(f"{folder}/{name}")
            if limit is not None and limit < _UNLIMITED_BYTES:
                yield Limit(limit, f"{folder}/{name}")


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """Yield the folders of this process's group and of all groups above it: each of them may set a limit.

    Args:
        controller: A controller of version 1; empty for the single hierarchy of version 2.
    """
    for line in (machine.text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        mounts = (f"/sys/fs/cgroup/{controllers}", f"/sys/fs/cgroup/{controller}")
        mount = next((mount for mount in mounts if machine.exists(mount)), None) if controller else "/sys/fs/cgroup"
        if mount is None:
            continue
        parts = [part for part in path.split("/") if part]
        for length in range(len(parts), -1, -1):
            yield "/".join([mount, *parts[:length]])

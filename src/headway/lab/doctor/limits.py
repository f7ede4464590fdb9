"""Limits on the resources of one process or user (ulimit)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headway.core.format import format_bytes
from headway.core.machine.system import Machine
from headway.lab.doctor.findings import Finding

_LIMITS = "/proc/self/limits"

#: A worker opens a file for each shard of its data, and connections to all other workers.
_FILES = 4096
#: Threads count too: data workers, OpenMP and NCCL of every worker.
_PROCESSES = 4096


def examine_limits(machine: Machine) -> Iterator[Finding]:
    """Examine open files, locked memory, processes and core files."""
    limits = _read(machine)
    if not limits:
        yield Finding("note", "the limits of this process could not be read", _LIMITS)
        return
    yield from _files(limits)
    yield from _locked_memory(machine, limits)
    processes = limits.get("Max processes")
    if processes is not None and processes[0] is not None and processes[0] < _PROCESSES:
        yield Finding(
            "warning",
            f"only {processes[0]:,} processes and threads per user",
            _LIMITS,
            "allow more",
            f"ulimit -u {_PROCESSES * 4}",
        )
    core = limits.get("Max core file size")
    if core is not None and (core[0] is None or core[0] > 0):
        size = "of any size" if core[0] is None else f"of up to {format_bytes(core[0])}"
        yield Finding(
            "note",
            f"a crash leaves a core file {size}, as large as the worker's memory",
            _LIMITS,
            "switch it off unless you want to look at one",
            "ulimit -c 0",
        )


def _files(limits: dict[str, tuple[int | None, int | None]]) -> Iterator[Finding]:
    soft, hard = limits.get("Max open files", (None, None))
    if soft is None or soft >= _FILES:
        yield Finding("ok", f"open files: {'unlimited' if soft is None else f'{soft:,}'}", _LIMITS)
        return
    may = hard is None or hard > soft
    yield Finding(
        "warning",
        f"only {soft:,} open files per process: stores with many shards and many workers need more",
        _LIMITS,
        "allow more" if may else "the hard limit is as low: ask the administrator, or LimitNOFILE= of the service",
        f"ulimit -n {min(hard, 65536) if hard else 65536}" if may else None,
    )


def _locked_memory(machine: Machine, limits: dict[str, tuple[int | None, int | None]]) -> Iterator[Finding]:
    """Examine locked memory if there is an RDMA device; only RDMA pins memory."""
    if not machine.names("/sys/class/infiniband") or "Max locked memory" not in limits:
        return
    soft, hard = limits["Max locked memory"]
    if soft is None:
        yield Finding("ok", "locked memory: unlimited, as RDMA needs it", _LIMITS)
        return
    yield Finding(
        "warning",
        f"only {format_bytes(soft)} of memory may be locked: RDMA fails to register its buffers",
        _LIMITS,
        "allow all of it, in /etc/security/limits.conf, the service (LimitMEMLOCK=infinity) or the container",
        "ulimit -l unlimited" if hard is None else "docker run --ulimit memlock=-1 ...",
    )


def _read(machine: Machine) -> dict[str, tuple[int | None, int | None]]:
    """Return the soft and hard limits by name; None is unlimited."""
    found = {}
    for line in (machine.text(_LIMITS) or "").splitlines()[1:]:
        match = re.match(r"(Max [a-z -]+?)\s{2,}(\S+)\s+(\S+)", line)
        if match:
            soft, hard = (None if text == "unlimited" else int(text) for text in match.groups()[1:])
            found[match[1]] = (soft, hard)
    return found

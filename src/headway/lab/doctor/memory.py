"""Main memory, and shared memory in /dev/shm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from headway.core.format import format_bytes
from headway.core.machine.memory import host_memory, meminfo
from headway.core.machine.system import Machine
from headway.lab.doctor.findings import Finding

_SHM = "/dev/shm"

#: Docker's default is 64 MiB. NCCL needs about 10 MB per channel and pair of GPUs without NVLink or peer-to-peer.
_SHM_ENOUGH_BYTES = 2**30

#: With a smaller share of memory free, a checkpoint or a tokenizer may exhaust it.
_LOW_SHARE = 0.1


def examine_memory(machine: Machine, updates: Callable[[], float | None] | None = None) -> Iterator[Finding]:
    """Examine total and free memory, its limit, swap and /dev/shm.

    Args:
        machine: The machine to examine.
        updates: Measures and keeps the bytes per second of AdamW updates in this memory; None if it cannot.
    """
    found = host_memory(machine)
    if found is None:
        yield Finding("note", "the amount of memory could not be determined", "/proc/meminfo")
        return
    total = found.allowed_bytes
    available = found.available_bytes
    where = found.where
    if total < found.total_bytes:
        yield Finding(
            "note",
            f"this process may use {format_bytes(total)} of the machine's {format_bytes(found.total_bytes)};"
            " beyond that the kernel kills it",
            where,
            "plan with the limit, or ask for more",
        )
    text = f"{format_bytes(available)} of {format_bytes(total)} memory is free"
    if available is not None and available < _LOW_SHARE * total:
        yield Finding("warning", text, where, "see which processes use it", "ps aux --sort=-rss | head")
    else:
        yield Finding("ok", text, where)
    yield from _swap(meminfo(machine))
    yield from _shared_memory(machine)
    if updates is None:
        return
    rate = updates()
    if rate is None:
        yield Finding("warning", "AdamW updates in host memory could not be measured", "python -c 'import torch'")
    else:
        text = f"AdamW updates in host memory move {rate / 1e9:.1f} GB/s with all cores; kept for headway plan"
        yield Finding("ok", text, "measured")


def _swap(facts: dict[str, int]) -> Iterator[Finding]:
    total = facts.get("SwapTotal", 0)
    free = facts.get("SwapFree", 0)
    if total and total - free > 0.25 * total:
        yield Finding(
            "warning",
            f"{format_bytes(total - free)} of {format_bytes(total)} swap is in use: memory has been short",
            "/proc/meminfo",
            "free memory; steps wait for pages that were swapped out",
        )
    else:
        yield Finding("ok", f"swap: {format_bytes(total)}" if total else "no swap", "/proc/meminfo")


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    try:
        space = machine.space(Path(_SHM))
    except OSError:
        yield Finding("note", "there is no /dev/shm", _SHM)
        return
    text = f"{format_bytes(space.free_bytes)} of {format_bytes(space.total_bytes)} are free in /dev/shm"
    if space.free_bytes < _SHM_ENOUGH_BYTES:
        yield Finding(
            "warning",
            f"{text}: NCCL between GPUs and DataLoader workers need more",
            _SHM,
            "start the container with more; on Kubernetes mount an emptyDir with medium: Memory there",
            "docker run --shm-size=8g ...   (or --ipc=host)",
        )
    else:
        yield Finding("ok", text, _SHM)

"""The memory condition: when main memory runs out, the kernel kills processes without a message."""

from __future__ import annotations

from headway.core.format import format_bytes
from headway.core.machine.memory import host_memory
from headway.core.machine.system import Machine
from headway.training.conditions.condition import Reading

#: Warn if less than this share of the allowed memory is left.
_LOW_SHARE = 0.05


class Memory:
    """Main memory of the machine, or of the container or job that this process runs in."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def read(self) -> Reading:
        """Report the memory that is left."""
        found = host_memory(self._machine)
        if found is None or found.available_bytes is None:
            return Reading()
        metrics = {"health/memory_available_gib": found.available_bytes / 2**30}
        if found.available_bytes >= _LOW_SHARE * found.allowed_bytes:
            return Reading(metrics)
        left = format_bytes(found.available_bytes)
        allowed = format_bytes(found.allowed_bytes)
        what = f"{left} of {allowed} main memory are left ({found.where}); when none is, the kernel kills this run"
        return Reading(metrics, {"memory": what})

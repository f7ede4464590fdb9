"""Name, vendor and features of this machine's processor."""

from __future__ import annotations

import platform

from headway.core.machine.cores import read_processors
from headway.core.machine.system import Machine


def cpu_name() -> str:
    """Return the processor's name; the machine's architecture if the name is unknown."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_kind() -> str:
    """Return the processor's name, with family and model where known (x86).

    One name, as virtual machines report it, may cover processors of several generations.
    """
    facts = _cpuinfo()
    told = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return ", ".join([cpu_name(), *told])


def cpu_flags() -> set[str]:
    """Return the features that the processor reports; empty if unknown."""
    facts = _cpuinfo()
    return set(facts.get("flags", facts.get("Features", "")).split())


def cpu_vendor() -> str:
    """Return the processor's vendor, as in "AuthenticAMD"; empty if unknown."""
    return _cpuinfo().get("vendor_id", "")


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's entry of /proc/cpuinfo; empty if there is none."""
    return next(iter(read_processors(Machine())), {})

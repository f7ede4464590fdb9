"""The CPU: number of cores, how many of them this process may use, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.core.machine.cores import Cores, read_cores, read_processors
from headway.core.machine.system import Machine
from headway.core.user_command import suggest
from headway.lab.doctor.findings import Finding

_CPUFREQ = "/sys/devices/system/cpu/cpu0/cpufreq"

#: Instruction sets that matter for bf16 and int8 matrix products, best first.
_INSTRUCTIONS = {
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve2": "SVE2",
    "sve": "SVE",
    "bf16": "BF16",
    "asimd": "NEON",
}


def examine_processor(machine: Machine, bf16_speed: Callable[[], float] | None = None) -> Iterator[Finding]:
    """Examine sockets, cores, NUMA nodes, limits, hyper-threads, instruction sets and the governor.

    Args:
        machine: The machine to examine.
        bf16_speed: Measures the speed of bf16 matrix products relative to fp32; 0 if bf16 is emulated.
    """
    processors = read_processors(machine)
    cores = read_cores(machine)
    first = processors[0] if processors else {}
    sockets = len({p["physical id"] for p in processors if "physical id" in p}) or None
    physical = len({(p["physical id"], p["core id"]) for p in processors if {"physical id", "core id"} <= p.keys()})
    nodes = len([name for name in machine.names("/sys/devices/system/node") if name.removeprefix("node").isdigit()])
    parts = [
        first.get("model name", "unknown processor"),
        f"{cores.seen} logical processors",
        *([f"{physical} cores"] if physical else []),
        *([f"{sockets} sockets"] if sockets and sockets > 1 else []),
        *([f"{nodes} NUMA nodes"] if nodes > 1 else []),
    ]
    yield Finding("ok", ", ".join(parts), "/proc/cpuinfo")
    yield from _limits(cores)
    yield from _instructions(first)
    if bf16_speed is not None:
        yield _bf16(bf16_speed())
    if machine.text("/sys/devices/system/cpu/smt/active") == "1":
        yield Finding(
            "note",
            "hyper-threads are on: two of them share one core's arithmetic",
            "/sys/devices/system/cpu/smt/active",
            "count cores, not threads, when you set parallel.threads",
            f"parallel.threads={max(1, min(physical or cores.usable, cores.usable))}",
        )
    if nodes > 1:
        yield Finding(
            "note",
            f"memory is in {nodes} NUMA nodes: a process is slower on another node's memory",
            "/sys/devices/system/node",
            "one worker per node trains on CPUs fastest",
            "numactl --cpunodebind=0 --membind=0 ...",
        )
    yield from _governor(machine)


def _limits(cores: Cores) -> Iterator[Finding]:
    threads = f"parallel.threads={cores.usable}"
    if cores.limit is not None and cores.limit.value < cores.allowed:
        yield Finding(
            "warning",
            f"this process may use {cores.limit.value:g} of the {cores.seen} processors that programs see;"
            " with one thread for each the kernel would throttle it",
            cores.limit.where,
            "as many threads, over all workers, as processors granted, or ask for more processors",
            f"export OMP_NUM_THREADS={cores.usable}; {suggest('train', threads, unknown='...')}",
        )
    elif cores.allowed < cores.seen:
        yield Finding(
            "note",
            f"this process may run on {cores.allowed} of {cores.seen} processors",
            "/proc/self/status (Cpus_allowed_list)",
            "as many threads, over all workers, as processors granted",
            threads,
        )
    else:
        yield Finding("ok", f"all {cores.seen} processors may be used", "/proc/self/status (Cpus_allowed_list)")


def _instructions(processor: dict[str, str]) -> Iterator[Finding]:
    flags = set(processor.get("flags", processor.get("Features", "")).split())
    known = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    if not flags:
        return
    if {"avx2", "asimd", "sve"} & flags:
        slow = "" if {"amx_bf16", "avx512_bf16", "bf16"} & flags else "; there are no bf16 instructions"
        yield Finding("ok", f"matrix instructions: {', '.join(known)}{slow}", "/proc/cpuinfo")
    else:
        yield Finding(
            "warning",
            "the processor shows no AVX2: PyTorch's fast kernels cannot be used",
            "/proc/cpuinfo",
            "in a virtual machine, pass the host's processor through",
            "-cpu host",
        )


def _bf16(speed: float) -> Finding:
    """Report the speed of bf16; instructions alone do not determine it: some CPUs and virtual machines halve it."""
    what = f"matrix products in bf16 have {speed:.1f} x the speed of fp32" if speed else "bf16 is emulated"
    if speed > 1:
        return Finding("ok", what, "measured on one core")
    return Finding("note", what, "measured on one core", "train in fp32 on this processor", "train.precision=fp32")


def _governor(machine: Machine) -> Iterator[Finding]:
    governor = machine.text(f"{_CPUFREQ}/scaling_governor")
    driver = machine.text(f"{_CPUFREQ}/scaling_driver") or ""
    if governor is None:
        return
    # In their active modes these drivers reach full speed under load even with "powersave".
    dynamic = driver in ("intel_pstate", "amd-pstate-epp")
    if governor == "powersave" and not dynamic:
        yield Finding(
            "warning",
            "the processor is held at its lowest frequency (governor powersave)",
            f"{_CPUFREQ}/scaling_governor",
            "let it run at full speed",
            "sudo cpupower frequency-set -g performance",
        )
    else:
        yield Finding("ok", f"frequency governor {governor}", f"{_CPUFREQ}/scaling_governor")

"""Environment variables that slow training down, contradict each other or the machine, or are leftovers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from headway.core.coordination.launch_variables import OF_A_WORKER
from headway.core.machine.cores import Cores
from headway.core.machine.system import Machine
from headway.lab.doctor.findings import Finding
from headway.parallel.interconnect import Interconnect

#: Debugging variables: name, value or None for any, effect.
_DEBUGGING: tuple[tuple[str, str | None, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", "1", "the CPU waits for every GPU kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "every collective is checked between all workers first"),
    ("TORCH_SHOW_DISPATCH_TRACE", "1", "every operation is printed"),
    ("TORCH_CPP_LOG_LEVEL", "INFO", "PyTorch's C++ side logs a lot"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "every tensor asks the driver for memory"),
    ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1", "kernels are built to be dumped"),
    ("NCCL_DEBUG", "TRACE", "NCCL prints every call"),
    ("NCCL_CHECK_POINTERS", "1", "NCCL checks every pointer"),
    ("NCCL_P2P_DISABLE", "1", "GPUs do not talk to each other directly, NVLink included"),
    ("NCCL_SHM_DISABLE", "1", "GPUs of one machine talk over the network"),
    ("NCCL_LAUNCH_MODE", "GROUP", "slower launches, for hunting hangs"),
    ("TORCHDYNAMO_DISABLE", "1", "train.compile does nothing"),
    ("TORCH_COMPILE_DISABLE", "1", "train.compile does nothing"),
    ("PYTHONMALLOC", "debug", "Python's memory is checked"),
    ("PYTHONDEVMODE", "1", "Python's checks are on"),
)

_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}

#: Packages that should come from their installation.
_OURS = ("headway", "torch", "numpy", "tokenizers", "safetensors", "pydantic")


def examine_environment(machine: Machine, cores: Cores, found: Interconnect) -> Iterator[Finding]:
    """Examine variables for threads, debugging, networks, GPUs, launchers and PYTHONPATH."""
    given = machine.environment
    findings = [
        *_threads(machine, cores),
        *_debugging(machine),
        *_interfaces(machine, found),
        *_rdma(machine, found),
        *_gpus(machine, found),
        *_launchers(machine),
        *_python_path(machine),
    ]
    if given.get("LD_PRELOAD"):
        what = f"LD_PRELOAD loads {given['LD_PRELOAD']} into every program"
        findings.append(Finding("note", what, "LD_PRELOAD", "unless you mean it", "unset LD_PRELOAD"))
    yield from findings or [Finding("ok", "no variable that hurts", "environment")]


def _threads(machine: Machine, cores: Cores) -> Iterator[Finding]:
    text = machine.environment.get("OMP_NUM_THREADS")
    if text is None:
        if cores.usable == cores.seen:  # otherwise the finding on the processor gives the value
            yield Finding("ok", "OMP_NUM_THREADS is not set: workers share the cores evenly", "OMP_NUM_THREADS")
        return
    first = text.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        yield Finding("warning", f"OMP_NUM_THREADS={text} is no number", "OMP_NUM_THREADS", "unset it",
                      "unset OMP_NUM_THREADS")  # fmt: skip
    elif int(first) > cores.usable:
        yield Finding(
            "warning",
            f"OMP_NUM_THREADS={text}, but this process may use {cores.usable} cores: threads wait for each other",
            "OMP_NUM_THREADS",
            "no more threads, over all workers, than cores",
            f"export OMP_NUM_THREADS={cores.usable}",
        )


def _debugging(machine: Machine) -> Iterator[Finding]:
    for name, value, effect in _DEBUGGING:
        given = machine.environment.get(name)
        if given is not None and (value is None or given.upper() == value.upper()):
            yield Finding("warning", f"{name}={given}: {effect}", name, "unset it for training", f"unset {name}")
    for old, new in _RENAMED.items():
        if old in machine.environment:
            what = f"{old} has been renamed and may be ignored"
            yield Finding("note", what, old, "use the new name", f"export {new}={machine.environment[old]}")


def _interfaces(machine: Machine, found: Interconnect) -> Iterator[Finding]:
    """Check that the named network interfaces exist."""
    up = {interface.name for interface in found.interfaces if interface.up} | {"lo"}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text = machine.environment.get(name)
        if not text or text.startswith("^"):
            continue
        # NCCL matches prefixes, or names after "="; the others match names.
        exact = text.startswith("=") or not name.startswith("NCCL")
        wanted = [part.split(":")[0] for part in text.lstrip("=").split(",") if part]
        if not any(i == part or (not exact and i.startswith(part)) for part in wanted for i in up):
            yield Finding(
                "error",
                f"{name}={text}: no such interface is up, so workers would not find each other",
                name,
                f"one of {', '.join(sorted(up))}, or leave it unset",
                f"unset {name}",
            )


def _rdma(machine: Machine, found: Interconnect) -> Iterator[Finding]:
    given = machine.environment
    active = found.active_ports("infiniband") or found.active_ports("roce")
    if given.get("NCCL_IB_DISABLE") == "1" and active:
        what = f"NCCL_IB_DISABLE=1, although RDMA devices such as {active[0].device} are usable"
        yield Finding("warning", what, "NCCL_IB_DISABLE", "let NCCL use RDMA", "unset NCCL_IB_DISABLE")
    if given.get("NCCL_IB_DISABLE") == "1" and given.get("NCCL_IB_HCA"):
        what = "NCCL_IB_DISABLE=1 and NCCL_IB_HCA contradict each other: the first one wins"
        yield Finding("warning", what, "NCCL_IB_DISABLE, NCCL_IB_HCA", "set one of them", "unset NCCL_IB_DISABLE")
    hcas = given.get("NCCL_IB_HCA", "")
    if hcas and not hcas.startswith("^") and given.get("NCCL_IB_DISABLE") != "1":
        wanted = [part.split(":")[0] for part in hcas.lstrip("=").split(",") if part]
        devices = {port.device for port in found.ports}
        if not any(device == part or device.startswith(part) for part in wanted for device in devices):
            there = ", ".join(sorted(devices)) or "none"
            what = f"NCCL_IB_HCA={hcas}, but the RDMA devices here are: {there}"
            yield Finding("warning", what, "NCCL_IB_HCA", "NCCL would fall back to sockets", "unset NCCL_IB_HCA")
    if given.get("NCCL_NVLS_ENABLE") == "1" and found.gpus and not found.nvlink_sharp:
        what = "NCCL_NVLS_ENABLE=1 needs NVLink switches that can reduce, but there are none"
        yield Finding(
            "warning", what, "NCCL_NVLS_ENABLE", "let NCCL check with the driver", "export NCCL_NVLS_ENABLE=2"
        )


def _gpus(machine: Machine, found: Interconnect) -> Iterator[Finding]:
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found.gpus:
        return
    name = "CUDA_VISIBLE_DEVICES"
    chosen = [part.strip() for part in visible.split(",")]
    wrong = [part for part in chosen if part.lstrip("-").isdigit() and not 0 <= int(part) < found.gpus]
    if visible.strip() == "" or wrong[:1] == chosen[:1]:
        yield Finding("warning", f"{name}={visible!r} hides every GPU", name, "unset it", f"unset {name}")
    elif wrong:
        # CUDA stops reading the list at the first invalid number.
        what = f"{name}={visible}: there is no GPU {wrong[0]}, and those named after it are hidden too"
        yield Finding("warning", what, name, f"numbers from 0 to {found.gpus - 1}", f"unset {name}")


def _launchers(machine: Machine) -> Iterator[Finding]:
    given = machine.environment
    if {"RANK", "WORLD_SIZE"} <= given.keys() and "TORCHELASTIC_RUN_ID" not in given:
        yield Finding(
            "warning",
            f"RANK={given['RANK']} and WORLD_SIZE={given['WORLD_SIZE']} are set without torchrun:"
            " headway train takes this process for one of several workers and waits for the others",
            "RANK, WORLD_SIZE",
            "unless your scheduler sets them for every worker",
            f"unset {' '.join(OF_A_WORKER)}",
        )


def _python_path(machine: Machine) -> Iterator[Finding]:
    """Report folders that hide installed packages or Python's own modules."""
    modules = {f"{name}.py" for name in sys.stdlib_module_names}
    for entry in filter(None, machine.environment.get("PYTHONPATH", "").split(os.pathsep)):
        if not machine.exists(entry):
            what = f"PYTHONPATH contains {entry}, which does not exist"
            yield Finding("note", what, "PYTHONPATH", "remove it", "unset PYTHONPATH")
            continue
        names = set(machine.names(entry))
        hidden = sorted(names & modules)
        if hidden:
            what = f"{Path(entry) / hidden[0]} hides Python's own module of that name"
            yield Finding("warning", what, "PYTHONPATH", "rename it, or remove the folder", "unset PYTHONPATH")
        packages = [name for name in _OURS if name in names]
        if packages:
            what = f"PYTHONPATH takes {', '.join(packages)} from {entry}, whatever is installed"
            yield Finding("note", what, "PYTHONPATH", "unless you mean it", "unset PYTHONPATH")

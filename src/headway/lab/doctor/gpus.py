"""NVIDIA GPUs: models, health, other processes on them, and links."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.format import format_bytes
from headway.lab.doctor.findings import Finding
from headway.parallel.interconnect import Interconnect
from headway.telemetry.gpus import QUERY, Driver, Gpu


def examine_gpus(driver: Driver, found: Interconnect) -> Iterator[Finding]:
    """Examine names and memory, health, MIG and links."""
    if not driver.gpus:
        yield from _without(driver)
        return
    yield from _names(driver, found)
    for gpu in driver.gpus:
        yield from _health(gpu)
    yield from _settings(driver.gpus)
    yield from _links(driver.gpus, found)


def examine_processes(driver: Driver) -> Iterator[Finding]:
    """Report other processes on the GPUs."""
    users = [(gpu.index, *process) for gpu in driver.gpus for process in gpu.processes]
    for index, pid, name, size in users:
        used = f", {format_bytes(size)}" if size is not None else ""
        yield Finding(
            "warning",
            f"GPU {index} is used by process {pid} ({name}{used})",
            QUERY,
            "wait for it, end it if it is yours, or take other GPUs",
            "export CUDA_VISIBLE_DEVICES=...",
        )
    if driver.gpus and not users:
        yield Finding("ok", "no other process is seen on the GPUs (a container sees only its own)", QUERY)


def _without(driver: Driver) -> Iterator[Finding]:
    output = driver.output
    if output.state == "silent":
        yield Finding(
            "error",
            "nvidia-smi does not answer: a GPU or the driver hangs",
            QUERY,
            "see the kernel's messages (Xid), then reboot",
            "sudo dmesg | grep -i -E 'xid|nvrm'",
        )
    elif output.state == "failed":
        said = output.text.splitlines()[0] if output.text else "no reason given"
        yield Finding(
            "error",
            f"nvidia-smi fails: {said}",
            QUERY,
            "load or install the driver; after an update reboot",
            "sudo modprobe nvidia && nvidia-smi",
        )
    elif driver.devices:
        yield Finding(
            "error",
            f"{driver.devices} NVIDIA devices are on the PCI bus, but there is no nvidia-smi",
            "/sys/bus/pci/devices",
            "install the driver; in a container, the NVIDIA container toolkit on its host",
            "docker run --gpus all ...",
        )
    else:
        yield Finding("ok", "no NVIDIA GPU: training is on the CPU", "nvidia-smi, /sys/bus/pci/devices")


def _names(driver: Driver, found: Interconnect) -> Iterator[Finding]:
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for gpu in driver.gpus:
        kinds.setdefault((gpu.name, gpu.memory_bytes), []).append(gpu.index)
    capability = f", compute capability {found.compute_capability}" if found.compute_capability else ""
    for (name, memory), indexes in kinds.items():
        yield Finding("ok", f"{len(indexes)} x {name}, {format_bytes(memory)}{capability}", QUERY)
    most = max(kinds.values(), key=lambda indexes: len(indexes))
    if len(kinds) > 1:
        yield Finding(
            "warning",
            "GPUs of different kinds: every step waits for the slowest",
            QUERY,
            "train on one kind",
            f"export CUDA_VISIBLE_DEVICES={','.join(map(str, most))}",
        )


def _health(gpu: Gpu) -> Iterator[Finding]:
    where = f"{QUERY} -i {gpu.index}"
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
    if gpu.rows_failed:
        yield Finding("error", f"GPU {gpu.index}: broken memory could not be replaced", where, "replace the GPU")
    if gpu.uncorrected_errors:
        what = f"GPU {gpu.index}: {gpu.uncorrected_errors:,} uncorrected memory errors since the driver was loaded"
        yield Finding("error", what, where, "reset the GPU; if they come back, replace it", reset)
    if gpu.rows_pending:
        what = f"GPU {gpu.index}: broken memory is replaced at the next reset"
        yield Finding("warning", what, where, "reset the GPU before a long run", reset)
    if gpu.throttles:
        yield Finding(
            "warning",
            f"GPU {gpu.index} is slowed down: {'; '.join(gpu.throttles)}",
            where,
            "check cooling and power",
            "nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
        )
    if gpu.link_width and gpu.link_width[0] < gpu.link_width[1]:
        what = f"GPU {gpu.index} uses {gpu.link_width[0]} of {gpu.link_width[1]} PCIe lanes"
        yield Finding("warning", what, where, "seat it again, or see whether its slot has more")
    if gpu.fabric and gpu.fabric[0] in ("Not Started", "In Progress"):
        yield Finding(
            "error",
            f"GPU {gpu.index} has not joined the NVSwitch fabric ({gpu.fabric[0]}): CUDA cannot start",
            where,
            "start the fabric manager, in the driver's version",
            "sudo systemctl start nvidia-fabricmanager",
        )
    elif gpu.fabric and gpu.fabric[1] not in ("Success", "N/A"):
        what = f"GPU {gpu.index} failed to join the NVSwitch fabric: {gpu.fabric[1]}"
        yield Finding("error", what, where, "see the fabric manager's log", "journalctl -u nvidia-fabricmanager")


def _settings(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    for name, command, chosen, what in (
        ("persistence mode is off", "sudo nvidia-smi -pm 1", [g for g in gpus if g.persistent is False],
         "each start waits while the driver wakes the GPUs"),
        ("ECC is off", "sudo nvidia-smi -e 1", [g for g in gpus if g.ecc is False],
         "a flipped bit of memory goes unseen into the weights"),
    ):  # fmt: skip
        if chosen:
            which = ", ".join(str(gpu.index) for gpu in chosen)
            yield Finding("note", f"{name} on GPU {which}: {what}", QUERY, "switch it on", command)
    sliced = [gpu for gpu in gpus if gpu.mig]
    if sliced:
        yield Finding(
            "warning",
            f"MIG is on (GPU {', '.join(str(gpu.index) for gpu in sliced)}): a process sees one slice only, and slices"
            " cannot talk to each other over NVLink",
            QUERY,
            "train with one worker, or have MIG switched off",
            "sudo nvidia-smi -mig 0",
        )


def _links(gpus: tuple[Gpu, ...], found: Interconnect) -> Iterator[Finding]:
    topology = found.topology
    where = "nvidia-smi topo -m"
    if len(gpus) < 2:
        return
    if topology is None:
        yield Finding("note", "the links between the GPUs could not be determined", where)
        return
    ways = sorted(set(topology.between_gpus.values()))
    if topology.nvlinks:
        through = " through NVSwitch" if topology.is_switched else ""
        yield Finding("ok", f"NVLink between all GPUs{through}: {', '.join(ways)}", where)
        return
    fewer = "not between all GPUs" if any(way.startswith("NV") for way in ways) else "no NVLink"
    far = [way for way in ways if way in ("NODE", "SYS")]
    yield Finding(
        "note",
        f"{fewer}: some pairs talk over PCIe ({', '.join(ways)})" + (", through the CPUs and slowly" if far else ""),
        where,
        "gradients cost more than on NVLink; measure it",
        f"headway doctor --communication -w {len(gpus)} --device cuda",
    )

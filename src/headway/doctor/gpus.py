"""NVIDIA GPUs: what they are, how healthy they are, who else uses them, and how they are connected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from headway.core.format import format_bytes
from headway.core.machine import Machine, Output
from headway.doctor.findings import Finding
from headway.parallel.interconnect import Interconnect

_QUERY = "nvidia-smi -q -x"

#: How it says that it does not know.
_UNKNOWN = ("", "N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated")

#: Reasons for a lower clock that nobody wants; a power cap under load and an idle clock are as they should be.
_THROTTLES = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "too hot (hardware)",
    "hw_power_brake_slowdown": "power brake: the supply asks for less",
    "sw_thermal_slowdown": "too hot (driver)",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as `nvidia-smi -q -x` describes it; None is unknown or not applicable."""

    index: int
    name: str
    memory_bytes: int | None
    persistent: bool | None
    mig: bool | None
    ecc: bool | None
    uncorrected_errors: int
    """Since the driver was loaded."""
    rows_pending: bool
    """Broken memory rows wait for a reset of the GPU to be replaced."""
    rows_failed: bool
    throttles: tuple[str, ...]
    link_width: tuple[int, int] | None
    """PCIe lanes in use and at most."""
    fabric: tuple[str, str] | None
    """State and status of the registration with the NVSwitch fabric."""
    processes: tuple[tuple[int, str, int | None], ...]
    """Process id, name, bytes."""


@dataclass(frozen=True)
class Driver:
    """What `nvidia-smi` tells: the driver, its GPUs, or why it tells nothing."""

    version: str | None
    cuda: str | None
    """The newest CUDA that the driver can run."""
    gpus: tuple[Gpu, ...]
    output: Output
    devices: int
    """NVIDIA display or compute devices on the PCI bus, with or without a driver."""


def read_driver(machine: Machine) -> Driver:
    """Ask the driver, and the PCI bus."""
    devices = sum(_is_nvidia_gpu(machine, name) for name in machine.names("/sys/bus/pci/devices"))
    output = machine.run(_QUERY.split())
    if output.state == "ok":
        try:
            log = ElementTree.fromstring(output.text)
        except ElementTree.ParseError as error:
            output = Output("failed", f"its output is no XML: {error}")
        else:
            gpus = tuple(_gpu(index, node) for index, node in enumerate(log.findall("gpu")))
            return Driver(_known(log, "driver_version"), _known(log, "cuda_version"), gpus, output, devices)
    return Driver(None, None, (), output, devices)


def examine_gpus(driver: Driver, found: Interconnect) -> Iterator[Finding]:
    """Names and memory, health, MIG, links between them."""
    if not driver.gpus:
        yield from _without(driver)
        return
    yield from _names(driver, found)
    for gpu in driver.gpus:
        yield from _health(gpu)
    yield from _settings(driver.gpus)
    yield from _links(driver.gpus, found)


def examine_processes(driver: Driver) -> Iterator[Finding]:
    """Who else is on the GPUs."""
    users = [(gpu.index, *process) for gpu in driver.gpus for process in gpu.processes]
    for index, pid, name, size in users:
        used = f", {format_bytes(size)}" if size is not None else ""
        yield Finding(
            "warning",
            f"GPU {index} is used by process {pid} ({name}{used})",
            _QUERY,
            "wait for it, end it if it is yours, or take other GPUs",
            "export CUDA_VISIBLE_DEVICES=...",
        )
    if driver.gpus and not users:
        yield Finding("ok", "no other process is seen on the GPUs (a container sees only its own)", _QUERY)


def _without(driver: Driver) -> Iterator[Finding]:
    output = driver.output
    if output.state == "silent":
        yield Finding(
            "error",
            "nvidia-smi does not answer: a GPU or the driver hangs",
            _QUERY,
            "see the kernel's messages (Xid), then reboot",
            "sudo dmesg | grep -i -E 'xid|nvrm'",
        )
    elif output.state == "failed":
        said = output.text.splitlines()[0] if output.text else "no reason given"
        yield Finding(
            "error",
            f"nvidia-smi fails: {said}",
            _QUERY,
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
        yield Finding("ok", f"{len(indexes)} x {name}, {format_bytes(memory)}{capability}", _QUERY)
    most = max(kinds.values(), key=lambda indexes: len(indexes))
    if len(kinds) > 1:
        yield Finding(
            "warning",
            "GPUs of different kinds: every step waits for the slowest",
            _QUERY,
            "train on one kind",
            f"export CUDA_VISIBLE_DEVICES={','.join(map(str, most))}",
        )


def _health(gpu: Gpu) -> Iterator[Finding]:
    where = f"{_QUERY} -i {gpu.index}"
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
            "look after cooling and power",
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
            yield Finding("note", f"{name} on GPU {which}: {what}", _QUERY, "switch it on", command)
    sliced = [gpu for gpu in gpus if gpu.mig]
    if sliced:
        yield Finding(
            "warning",
            f"MIG is on (GPU {', '.join(str(gpu.index) for gpu in sliced)}): a process sees one slice only, and slices"
            " cannot talk to each other over NVLink",
            _QUERY,
            "train with one worker, or have MIG switched off",
            "sudo nvidia-smi -mig 0",
        )


def _links(gpus: tuple[Gpu, ...], found: Interconnect) -> Iterator[Finding]:
    topology, where = found.topology, "nvidia-smi topo -m"
    if len(gpus) < 2:
        return
    if topology is None:
        yield Finding("note", "how the GPUs are connected could not be found out", where)
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


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    reasons = node.find("clocks_event_reasons")
    if reasons is None:
        reasons = node.find("clocks_throttle_reasons")  # before driver 535
    active = [child.tag for child in (reasons if reasons is not None else ()) if child.text == "Active"]
    short = {re.sub(r"^clocks_(event|throttle)_reason_", "", tag) for tag in active}
    widths = [_whole(node, f"pci/pci_gpu_link_info/link_widths/{which}_link_width") for which in ("current", "max")]
    fabric = (_known(node, "fabric/state"), _known(node, "fabric/status"))
    uncorrected = [
        _whole(node, f"ecc_errors/volatile/{name}") or 0
        # The first name is of older drivers.
        for name in (
            "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable",
        )
    ]  # fmt: skip
    return Gpu(
        index=index,
        name=_known(node, "product_name") or "unknown",
        memory_bytes=_mebibytes(node, "fb_memory_usage/total"),
        persistent=_switch(node, "persistence_mode"),
        mig=_switch(node, "mig_mode/current_mig"),
        ecc=_switch(node, "ecc_mode/current_ecc"),
        uncorrected_errors=sum(uncorrected),
        rows_pending=_known(node, "remapped_rows/remapped_row_pending") == "Yes",
        rows_failed=_known(node, "remapped_rows/remapped_row_failure") == "Yes",
        throttles=tuple(text for key, text in _THROTTLES.items() if key in short),
        link_width=(widths[0], widths[1]) if widths[0] and widths[1] else None,
        fabric=(fabric[0], fabric[1] or "N/A") if fabric[0] else None,
        processes=tuple(_processes(node)),
    )


def _processes(node: ElementTree.Element) -> Iterator[tuple[int, str, int | None]]:
    for process in node.findall("processes/process_info"):
        pid, kind = _whole(process, "pid"), _known(process, "type") or ""
        if pid is not None and "C" in kind:  # graphics alone does not train
            yield pid, _known(process, "process_name") or "unknown", _mebibytes(process, "used_memory")


def _is_nvidia_gpu(machine: Machine, device: str) -> bool:
    folder = f"/sys/bus/pci/devices/{device}"
    # PCI class 03: display controllers, 3D ones (0302) among them.
    return machine.text(f"{folder}/vendor") == "0x10de" and (machine.text(f"{folder}/class") or "").startswith("0x03")


def _known(node: ElementTree.Element, path: str) -> str | None:
    text = (node.findtext(path) or "").strip()
    return (
        None if text in ("", "N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated") else text
    )


def _switch(node: ElementTree.Element, path: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(_known(node, path) or "")


def _whole(node: ElementTree.Element, path: str) -> int | None:
    match = re.match(r"\d+", _known(node, path) or "")
    return int(match[0]) if match else None


def _mebibytes(node: ElementTree.Element, path: str) -> int | None:
    size = _whole(node, path)
    return None if size is None else size * 2**20

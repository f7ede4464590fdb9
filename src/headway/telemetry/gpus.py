"""What the driver of NVIDIA GPUs and the kernel's log report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from headway.core.machine.system import Machine, Output

QUERY = "nvidia-smi -q -x"

_XID = re.compile(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)")

#: Newest driver first; the first is the power of the last sample, not an average.
_POWER_DRAW = (
    "gpu_power_readings/instant_power_draw",
    "gpu_power_readings/power_draw",
    "power_readings/power_draw",
)
_POWER_LIMIT = ("gpu_power_readings/current_power_limit", "power_readings/power_limit")

#: Undesirable reasons for a lower clock; a power cap under load and an idle clock are normal.
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
    address: str
    """PCI address as the kernel's log writes it; empty if unknown."""
    memory_bytes: int | None
    memory_used_bytes: int | None
    utilization_percent: int | None
    """Share of the last sample period in which a kernel ran."""
    power_watts: float | None
    power_limit_watts: float | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    persistent: bool | None
    mig: bool | None
    ecc: bool | None
    uncorrected_errors: int
    """Since the driver was loaded."""
    corrected_errors: int | None
    """Since the driver was loaded; None without ECC."""
    rows_pending: bool
    """Broken memory rows wait for a reset of the GPU to be replaced."""
    rows_failed: bool
    throttles: tuple[str, ...]
    temperature_celsius: int | None
    link_width: tuple[int, int] | None
    """PCIe lanes in use and at most."""
    fabric: tuple[str, str] | None
    """State and status of the registration with the NVSwitch fabric."""
    processes: tuple[tuple[int, str, int | None], ...]
    """Process id, name, bytes."""


@dataclass(frozen=True)
class Driver:
    """The report of `nvidia-smi`: the driver, its GPUs, or why there is none."""

    version: str | None
    cuda: str | None
    """The newest CUDA that the driver can run."""
    gpus: tuple[Gpu, ...]
    output: Output
    devices: int
    """As `nvidia_devices`."""


def read_driver(machine: Machine) -> Driver:
    """Query the driver, and the PCI bus."""
    devices = nvidia_devices(machine)
    output = machine.run(QUERY.split())
    if output.state == "ok":
        try:
            log = ElementTree.fromstring(output.text)
        except ElementTree.ParseError as error:
            output = Output("failed", f"its output is no XML: {error}")
        else:
            gpus = tuple(_gpu(index, node) for index, node in enumerate(log.findall("gpu")))
            return Driver(_known(log, "driver_version"), _known(log, "cuda_version"), gpus, output, devices)
    return Driver(None, None, (), output, devices)


def nvidia_devices(machine: Machine) -> int:
    """Count NVIDIA display or compute devices on the PCI bus, with or without a driver."""
    return sum(_is_nvidia_gpu(machine, name) for name in machine.names("/sys/bus/pci/devices"))


def read_xids(machine: Machine) -> list[tuple[str, int]]:
    """Return PCI address and number of every Xid message in the kernel's log; none if it may not be read."""
    output = machine.run(("dmesg",))
    found = _XID.findall(output.text) if output.state == "ok" else []
    return [(device, int(number)) for device, number in found]


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
        # The first name is that of older drivers.
        for name in (
            "sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable",
        )
    ]  # fmt: skip
    names = ("sram_correctable", "dram_correctable")
    corrected = [count for name in names if (count := _whole(node, f"ecc_errors/volatile/{name}")) is not None]
    return Gpu(
        index=index,
        name=_known(node, "product_name") or "unknown",
        address=_short_address(node.get("id", "")),
        memory_bytes=_mebibytes(node, "fb_memory_usage/total"),
        memory_used_bytes=_mebibytes(node, "fb_memory_usage/used"),
        utilization_percent=_whole(node, "utilization/gpu_util"),
        power_watts=_first(node, _POWER_DRAW),
        power_limit_watts=_first(node, _POWER_LIMIT),
        sm_clock_mhz=_whole(node, "clocks/sm_clock"),
        memory_clock_mhz=_whole(node, "clocks/mem_clock"),
        persistent=_switch(node, "persistence_mode"),
        mig=_switch(node, "mig_mode/current_mig"),
        ecc=_switch(node, "ecc_mode/current_ecc"),
        uncorrected_errors=sum(uncorrected),
        corrected_errors=sum(corrected) if corrected else None,
        rows_pending=_known(node, "remapped_rows/remapped_row_pending") == "Yes",
        rows_failed=_known(node, "remapped_rows/remapped_row_failure") == "Yes",
        throttles=tuple(text for key, text in _THROTTLES.items() if key in short),
        temperature_celsius=_whole(node, "temperature/gpu_temp"),
        link_width=(widths[0], widths[1]) if widths[0] and widths[1] else None,
        fabric=(fabric[0], fabric[1] or "N/A") if fabric[0] else None,
        processes=tuple(_processes(node)),
    )


def _processes(node: ElementTree.Element) -> Iterator[tuple[int, str, int | None]]:
    for process in node.findall("processes/process_info"):
        pid = _whole(process, "pid")
        kind = _known(process, "type") or ""
        if pid is not None and "C" in kind:  # a process that only uses graphics does not train
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


def _first(node: ElementTree.Element, paths: tuple[str, ...]) -> float | None:
    """Return the number at the first of these paths that has one."""
    found = (re.match(r"\d+(?:\.\d+)?", _known(node, path) or "") for path in paths)
    return next((float(match[0]) for match in found if match), None)


def _short_address(address: str) -> str:
    """Write `00000000:65:00.0` as the kernel's log does: `0000:65:00`."""
    return re.sub(r"^0{4}(?=[0-9A-Fa-f]{4}:)|\.\d+$", "", address).lower()


def _mebibytes(node: ElementTree.Element, path: str) -> int | None:
    size = _whole(node, path)
    return None if size is None else size * 2**20

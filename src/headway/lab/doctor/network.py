"""Connections to other machines: RDMA devices, Ethernet, GPUDirect."""

from __future__ import annotations

from collections.abc import Iterator

from headway.lab.doctor.findings import Finding
from headway.parallel.interconnect import Interconnect, Interface, RdmaPort

_RDMA = "/sys/class/infiniband"
_NET = "/sys/class/net"

#: Common names of the link layers of RDMA ports.
_KINDS = {"infiniband": "InfiniBand", "roce": "RoCE"}


def examine_network(found: Interconnect) -> Iterator[Finding]:
    """Examine devices with their rates and states, and whether GPUs can use them without the CPU."""
    for port in found.ports:
        yield _port(port)
    yield from _slower(found)
    if found.ports and not found.verbs:
        yield Finding(
            "warning",
            "there are RDMA devices, but programs cannot open them",
            "/dev/infiniband",
            "load ib_uverbs; pass the devices to the container",
            "docker run --device=/dev/infiniband --ulimit memlock=-1 ...",
        )
    if not found.ports:
        yield Finding("ok", "no RDMA device (InfiniBand or RoCE)", _RDMA)
    yield from _interfaces(found)
    if found.gpus and found.ports:
        yield from _gpudirect(found)


def _port(port: RdmaPort) -> Finding:
    rate = "rate n/a" if port.gigabits_per_second is None else f"{port.gigabits_per_second:g} Gb/s"
    text = f"{port.device} port {port.port}: {_KINDS.get(port.kind, port.link_layer)}, {rate}, {port.state}"
    where = f"{_RDMA}/{port.device}/ports/{port.port}"
    if port.active:
        return Finding("ok", text, where)
    if port.state == "INIT" and port.kind == "infiniband":
        return Finding("warning", f"{text}: no subnet manager has configured it", where, "start one", "opensm")
    return Finding("note", text, where, "plug it in, or ignore it if it is unused")


def _slower(found: Interconnect) -> Iterator[Finding]:
    """Report ports that are slower than others: cards for storage, or links that fell back to a lower rate."""
    for kind in _KINDS:
        used = found.active_ports(kind)
        for port in found.ports:
            if used and port.kind == kind and port.active and port not in used:
                rate, fastest = (p.gigabits_per_second or 0.0 for p in (port, used[0]))
                yield Finding(
                    "note",
                    f"{port.device} port {port.port} has {rate:g} Gb/s where others have {fastest:g}:"
                    " profiles leave it out",
                    f"{_RDMA}/{port.device}/ports/{port.port}/rate",
                    "if it is not for storage, check its cable",
                    f"ibstat {port.device}",
                )


def _interfaces(found: Interconnect) -> Iterator[Finding]:
    chosen = found.socket_interface()
    real = [i for i in found.interfaces if i.has_hardware or i.default_route]
    for interface in real:
        used = ", the one for sockets" if interface == chosen else ""
        yield Finding("ok", _described(interface) + used, f"{_NET}/{interface.name}")
    if chosen is None:
        yield Finding(
            "note",
            "no network interface is up and has an address: training stays on this machine",
            _NET,
        )
        return
    speed = chosen.megabits_per_second
    if found.gpus and speed is not None and speed <= 10_000 and not any(port.active for port in found.ports):
        yield Finding(
            "note",
            f"{chosen.name} has {speed / 1000:g} Gb/s: GPUs of several machines would mostly wait for each other",
            f"{_NET}/{chosen.name}/speed",
            "measure it before you rely on it",
            "headway doctor --communication, under torchrun on every machine",
        )
    if speed is not None and speed >= 25_000 and chosen.mtu is not None and chosen.mtu < 8000:
        yield Finding(
            "note",
            f"{chosen.name} has an MTU of {chosen.mtu} bytes: larger packets cost the CPU less",
            f"{_NET}/{chosen.name}/mtu",
            "if every switch on the way allows it",
            f"sudo ip link set {chosen.name} mtu 9000",
        )


def _described(interface: Interface) -> str:
    speed = interface.megabits_per_second
    parts = [
        "up" if interface.up else "down",
        "speed n/a" if speed is None else f"{speed / 1000:g} Gb/s",
        f"MTU {interface.mtu}",
        *([] if interface.addressed or not interface.up else ["no address"]),
        *([] if interface.has_hardware else ["virtual"]),
    ]
    return f"{interface.name}: {', '.join(parts)}"


def _gpudirect(found: Interconnect) -> Iterator[Finding]:
    if found.gpudirect:
        yield Finding("ok", f"GPUDirect RDMA through {found.gpudirect}", f"/sys/module/{found.gpudirect}")
        return
    yield Finding(
        "warning",
        "no GPUDirect: data that GPUs send over RDMA is copied through main memory",
        "/sys/module/nvidia_peermem, /proc/driver/nvidia/version",
        "load the module, or use the driver's open kernel modules on Linux 5.12 or newer",
        "sudo modprobe nvidia-peermem",
    )

"""How a machine's GPUs reach each other and other machines: RDMA devices, network interfaces, NVLink, GPUDirect.

Read from /sys, /proc and `nvidia-smi`, without PyTorch and without opening a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headway.core.machine.system import Machine

#: /sys/class/net/*/type, from <linux/if_arp.h>.
_ETHERNET = 1
_INFINIBAND = 32

#: NVLinks of a Hopper or Blackwell GPU (NVIDIA H100 architecture whitepaper, "Fourth-Generation NVLink").
_LINKS_PER_GPU = 18

#: Connections between two devices in `nvidia-smi topo -m`, from near to far.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

#: Where distributions and HPC-X install libraries outside the loader's path.
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib", "/opt/mellanox/sharp/lib")


@dataclass(frozen=True)
class RdmaPort:
    """One port of a device below /sys/class/infiniband."""

    device: str
    port: int
    link_layer: str
    """"InfiniBand", "Ethernet" (RoCE) or another value of the driver."""
    state: str
    """"ACTIVE", "DOWN", "INIT", ..."""
    gigabits_per_second: float | None
    roce_v2_index: int | None
    """Index of the first RoCE v2 entry over IPv4 in the port's GID table."""

    @property
    def active(self) -> bool:
        """Whether the port can carry data."""
        return self.state == "ACTIVE"

    @property
    def kind(self) -> str:
        """ "infiniband", "roce", or "other" for devices that need a vendor plug-in (EFA)."""
        if self.device.startswith("efa") or self.link_layer not in ("InfiniBand", "Ethernet"):
            return "other"
        return "infiniband" if self.link_layer == "InfiniBand" else "roce"


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    up: bool
    has_hardware: bool
    """A physical device or a bond of such devices; not a bridge, a tunnel or one end of a veth pair."""
    is_ethernet: bool
    addressed: bool
    """Has an address that is routable beyond the link."""
    default_route: bool
    megabits_per_second: int | None
    mtu: int | None


@dataclass(frozen=True)
class GpuTopology:
    """The matrix of `nvidia-smi topo -m`."""

    gpus: tuple[str, ...]
    between_gpus: Mapping[tuple[str, str], str]
    """"NV18" for 18 NVLinks, or one of `DISTANCES`."""
    to_network: Mapping[str, str]
    """From each GPU to the nearest RDMA device, one of `DISTANCES`; empty if none is listed."""

    @property
    def nvlinks(self) -> int:
        """Smallest number of NVLinks between any two GPUs."""
        counts = [int(way[2:]) if re.fullmatch(r"NV\d+", way) else 0 for way in self.between_gpus.values()]
        return min(counts, default=0)

    @property
    def is_switched(self) -> bool:
        """Whether NVLinks go through switches: direct links between all pairs would exceed the links per GPU."""
        return self.nvlinks * (len(self.gpus) - 1) > _LINKS_PER_GPU


@dataclass(frozen=True)
class Interconnect:
    """Everything that the choice of NCCL settings depends on."""

    gpus: int
    """Number of GPUs; 0 if there are none or `nvidia-smi` does not report them."""
    compute_capability: float | None
    """Compute capability of the oldest GPU."""
    topology: GpuTopology | None
    ports: tuple[RdmaPort, ...]
    verbs: bool
    """Whether programs can open RDMA devices (/dev/infiniband)."""
    interfaces: tuple[Interface, ...]
    gpudirect: str | None
    """How the kernel lets network cards read GPU memory ("nvidia_peermem", "dmabuf"); None if it cannot."""
    sharp_library: str | None
    """Path of the plug-in for reductions in InfiniBand switches."""

    @property
    def nvlink_sharp(self) -> bool:
        """Whether the NVSwitches can reduce: third generation, Hopper or newer, more than two GPUs."""
        return bool(
            self.topology
            and self.topology.is_switched
            and self.compute_capability is not None
            and self.compute_capability >= 9.0
        )

    def active_ports(self, kind: str) -> tuple[RdmaPort, ...]:
        """Return the usable ports of a kind, without slower ones, which are for storage or management."""
        ports = [port for port in self.ports if port.kind == kind and port.active] if self.verbs else []
        fastest = max((port.gigabits_per_second or 0.0 for port in ports), default=0.0)
        return tuple(port for port in ports if (port.gigabits_per_second or 0.0) == fastest)

    def socket_interface(self) -> Interface | None:
        """Return the fastest real interface that is up and has an address.

        In a container with only virtual interfaces, returns the one with the default route.
        """
        usable = [i for i in self.interfaces if i.up and i.addressed]
        for candidates in (
            [i for i in usable if i.has_hardware and i.is_ethernet],
            [i for i in usable if i.has_hardware],
            [i for i in usable if i.default_route],
        ):
            if candidates:
                return max(candidates, key=lambda i: (i.megabits_per_second or 0, i.default_route))
        return None


def read_interconnect(machine: Machine, *, with_gpus: bool = True) -> Interconnect:
    """Inspect a machine; `with_gpus=False` skips `nvidia-smi`."""
    capabilities = _compute_capabilities(machine) if with_gpus else []
    return Interconnect(
        gpus=len(capabilities),
        compute_capability=min((c for c in capabilities if c is not None), default=None),
        topology=_topology(machine) if capabilities else None,
        ports=tuple(_rdma_ports(machine)),
        verbs=any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")),
        interfaces=tuple(_interfaces(machine)),
        gpudirect=_gpudirect(machine),
        sharp_library=_sharp_library(machine),
    )


def _compute_capabilities(machine: Machine) -> list[float | None]:
    """Return one value per GPU; None where an old driver does not report it."""
    output = machine.run(("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"))
    if output.state == "ok":
        lines = [line.strip() for line in output.text.splitlines() if line.strip()]
        if all(re.fullmatch(r"\d+\.\d+|\[.*\]", line) for line in lines):
            return [float(line) if line[0].isdigit() else None for line in lines]
    if output.state != "failed":
        return []
    listed = machine.run(("nvidia-smi", "-L"))
    return [None for line in listed.text.splitlines() if re.match(r"GPU \d+:", line)] if listed.state == "ok" else []


def _topology(machine: Machine) -> GpuTopology | None:
    output = machine.run(("nvidia-smi", "topo", "-m"))
    return parse_topology(output.text) if output.state == "ok" else None


def parse_topology(text: str) -> GpuTopology | None:
    """Parse the matrix of `nvidia-smi topo -m`; return None without one.

    Rows and columns are devices; "X" is on the diagonal. Columns of affinities follow the devices.
    """
    # Some versions underline the header line even without a terminal.
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next((line.split() for line in lines if re.match(r"\s*GPU0\b", line)), None)
    if head is None:
        return None
    columns = [name for name in head if re.fullmatch(r"(GPU|NIC)\d+|mlx\d+_\d+|\S*rdma\S*|efa\S*", name)]
    between: dict[tuple[str, str], str] = {}
    network: dict[str, str] = {}
    gpus = [name for name in columns if name.startswith("GPU")]
    for line in lines:
        cells = line.split()
        if not cells or cells[0] not in gpus or len(cells) <= len(columns):
            continue
        for column, way in zip(columns, cells[1:], strict=False):
            if column.startswith("GPU"):
                if column != cells[0]:
                    between[cells[0], column] = way
            elif way in DISTANCES:
                nearest = network.get(cells[0], DISTANCES[-1])
                network[cells[0]] = min(way, nearest, key=DISTANCES.index)
    return GpuTopology(tuple(gpus), between, network)


def _rdma_ports(machine: Machine) -> Iterator[RdmaPort]:
    for device in machine.names("/sys/class/infiniband"):
        for name in machine.names(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{name}"
            rate = re.match(r"([\d.]+) Gb/sec", machine.text(f"{folder}/rate") or "")
            yield RdmaPort(
                device=device,
                port=int(name),
                link_layer=machine.text(f"{folder}/link_layer") or "unknown",
                state=(machine.text(f"{folder}/state") or "unknown").split(":")[-1].strip(),
                gigabits_per_second=float(rate[1]) if rate else None,
                roce_v2_index=_roce_v2_index(machine, folder),
            )


def _roce_v2_index(machine: Machine, folder: str) -> int | None:
    for index in sorted(map(int, machine.names(f"{folder}/gid_attrs/types"))):
        gid = machine.text(f"{folder}/gids/{index}") or ""
        # An IPv4 address in a GID has the prefix ::ffff (RFC 4291, section 2.5.5.2).
        is_ipv4 = gid.startswith("0000:0000:0000:0000:0000:ffff:")
        if is_ipv4 and machine.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2":
            return index
    return None


def _interfaces(machine: Machine) -> Iterator[Interface]:
    routed, default = _routes(machine)
    for name in machine.names("/sys/class/net"):
        folder = f"/sys/class/net/{name}"
        if not machine.exists(f"{folder}/operstate") or name == "lo":
            continue  # a file such as bonding_masters, or the loopback interface
        speed = machine.number(f"{folder}/speed")
        yield Interface(
            name=name,
            # Drivers without link state report "unknown" and work.
            up=machine.text(f"{folder}/operstate") in ("up", "unknown"),
            has_hardware=machine.exists(f"{folder}/device") or machine.exists(f"{folder}/bonding"),
            is_ethernet=machine.number(f"{folder}/type") == _ETHERNET,
            addressed=name in routed,
            default_route=name in default,
            megabits_per_second=speed if speed is not None and speed > 0 else None,
            mtu=machine.number(f"{folder}/mtu"),
        )


def _routes(machine: Machine) -> tuple[set[str], set[str]]:
    """Return the interfaces that have an address, and those with a default route."""
    routed = set()
    default = set()
    for line in (machine.text("/proc/net/route") or "").splitlines()[1:]:
        name, destination = line.split()[:2]
        routed.add(name)
        if destination == "00000000":
            default.add(name)
    for line in (machine.text("/proc/net/if_inet6") or "").splitlines():
        _, _, _, scope, _, name = line.split()
        if scope == "00":  # global; other machines cannot reach a link-local address
            routed.add(name)
    return routed, default


def _gpudirect(machine: Machine) -> str | None:
    for module in ("nvidia_peermem", "nv_peer_mem"):
        if machine.exists(f"/sys/module/{module}"):
            return module
    # DMA-BUF needs the open kernel modules and Linux 5.12 (NCCL user guide, NCCL_DMABUF_ENABLE).
    release = re.match(r"(\d+)\.(\d+)", machine.text("/proc/sys/kernel/osrelease") or "")
    is_open = "Open Kernel Module" in (machine.text("/proc/driver/nvidia/version") or "")
    return "dmabuf" if is_open and release and (int(release[1]), int(release[2])) >= (5, 12) else None


def _sharp_library(machine: Machine) -> str | None:
    """Find NCCL's plug-in for SHARP; it needs libsharp_coll too."""
    folders = [*filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":")), *_LIBRARY_FOLDERS]
    names = {folder: machine.names(folder) for folder in folders}
    has_sharp = any(name.startswith("libsharp_coll.so") for found in names.values() for name in found)
    plugins = (f"{folder}/libnccl-net.so" for folder, found in names.items() if "libnccl-net.so" in found)
    return next(plugins, None) if has_sharp else None

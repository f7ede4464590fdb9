"""Accelerators and machines: memory, speeds, links, power. Uncertain values are None.

Peaks are in `telemetry.hardware`, where MFU takes them from too. All values are from the vendor's datasheet unless a
line says otherwise. A datasheet's GB of memory count as GiB, which drivers report to within 2 % (GDDR6 with error
correction: 6 % less); sums over both directions of a link are halved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from headway.core.errors import ConfigError
from headway.core.machine.memory import allowed_bytes
from headway.core.machine.processor import cpu_name
from headway.core.machine.system import Machine
from headway.telemetry.hardware import local_accelerators, peak_flops
from headway.telemetry.host_updates import kept_host_updates

#: GB/s in one direction of a slot with 16 lanes, by generation (PCI-SIG base specifications 3.1, 4.0, 5.0).
_PCIE = {3: 15.75, 4: 31.5, 5: 63.0}


@dataclass(frozen=True)
class Accelerator:
    """One device."""

    name: str
    """The user's name for it; "cpu" for machines without accelerators."""
    device_name: str
    """The driver's name for it, used by `peak_flops`."""
    memory_gib: float | None
    bandwidth_gb_per_second: float | None = None
    """Memory bandwidth."""
    link_gb_per_second: float | None = None
    """Bandwidth to other accelerators of the machine, one direction: all NVLink or Infinity Fabric links, else PCIe."""
    link: str = "an unknown link"
    """Kind of that link."""
    watts: float | None = None
    """Power limit of the board."""
    network_gbit_per_second: float | None = None
    """Bandwidth to other machines per accelerator, in the vendor's machine with eight of them."""
    product_share: float = 0.6
    """Share of the dense peak that large products reach in training."""
    attention_share: float = 0.3
    """Share of the dense peak that attention reaches, forward and backward, counting pairs that the mask leaves."""

    @property
    def device(self) -> str:
        """Device type: "cpu" or "cuda"."""
        return "cpu" if self.name == "cpu" else "cuda"

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak of products in FLOP/s for a `train.precision`; None if unknown or unsupported."""
        return peak_flops(self.device_name, precision)

    @property
    def lacks_fp8(self) -> bool:
        """Whether it is known to lack 8-bit products: it has a known peak, but none for fp8."""
        known = self.peak_flops("fp32") is not None
        return self.device == "cpu" or (known and self.peak_flops("fp8") is None)


def _nvlink(
    name: str, device: str, gib: float, gb_s: float, both_ways: float, *, watts: float | None, net: float | None
) -> Accelerator:
    return Accelerator(name, device, gib, gb_s, both_ways / 2, "NVLink", watts, net)


def _pcie(name: str, device: str, gib: float, gb_s: float, generation: int, *, watts: float | None) -> Accelerator:
    return Accelerator(name, device, gib, gb_s, _PCIE[generation], f"PCIe {generation}", watts)


# Networks: DGX H100, H200 and B200 user guides, eight ports of 400 Gb/s; DGX A100, eight of 200 Gb/s. NVLink bridges
# between pairs of PCIe cards are ignored: collectives over more than two cards also use slower links.
_KNOWN = (
    _nvlink("GB200", "NVIDIA GB200", 186, 8000, 1800, watts=None, net=400),
    _nvlink("B200", "NVIDIA B200", 180, 8000, 1800, watts=1000, net=400),  # HGX B200, divided by its 8 GPUs
    _nvlink("H200", "NVIDIA H200", 141, 4800, 900, watts=700, net=400),
    _nvlink("H100", "NVIDIA H100 80GB HBM3", 80, 3350, 900, watts=700, net=400),
    _pcie("H100-NVL", "NVIDIA H100 NVL", 94, 3900, 5, watts=400),
    _pcie("H100-PCIe", "NVIDIA H100 PCIe", 80, 2000, 5, watts=350),
    _nvlink("A100", "NVIDIA A100-SXM4-80GB", 80, 2039, 600, watts=400, net=200),
    _nvlink("A100-40GB", "NVIDIA A100-SXM4-40GB", 40, 1555, 600, watts=400, net=200),
    _pcie("A100-PCIe", "NVIDIA A100 80GB PCIe", 80, 1935, 4, watts=300),
    _pcie("A40", "NVIDIA A40", 48, 696, 4, watts=300),
    _pcie("A30", "NVIDIA A30", 24, 933, 4, watts=165),
    _pcie("A10", "NVIDIA A10", 24, 600, 4, watts=150),
    _pcie("L40S", "NVIDIA L40S", 48, 864, 4, watts=350),
    _pcie("L40", "NVIDIA L40", 48, 864, 4, watts=300),
    _pcie("L4", "NVIDIA L4", 24, 300, 4, watts=72),
    _pcie("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 48, 960, 4, watts=300),
    _pcie("RTX-A6000", "NVIDIA RTX A6000", 48, 768, 4, watts=300),
    _pcie("RTX-5090", "NVIDIA GeForce RTX 5090", 32, 1792, 5, watts=575),
    _pcie("RTX-4090", "NVIDIA GeForce RTX 4090", 24, 1008, 4, watts=450),
    _pcie("RTX-3090", "NVIDIA GeForce RTX 3090", 24, 936, 4, watts=350),
    _pcie("T4", "Tesla T4", 16, 320, 3, watts=70),
    _nvlink("V100", "Tesla V100-SXM2-32GB", 32, 900, 300, watts=300, net=None),
    Accelerator("MI325X", "AMD Instinct MI325X", 256, 6000, 448, "Infinity Fabric", 1000),
    Accelerator("MI300X", "AMD Instinct MI300X", 192, 5300, 448, "Infinity Fabric", 750),
)
#: Shares of the peak reached by products and by attention, from published training speeds of decoders with rows of
#: 2,048 to 65,536 tokens (`benchmarks/plan/published.py`). Other cards have the defaults.
_SHARES = {"A100": (0.7, 0.45), "A100-40GB": (0.7, 0.45), "H100": (0.6, 0.27), "H200": (0.6, 0.27)}
KNOWN: dict[str, Accelerator] = {
    accelerator.name: replace(accelerator, product_share=shares[0], attention_share=shares[1])
    if (shares := _SHARES.get(accelerator.name))
    else accelerator
    for accelerator in _KNOWN
}


@dataclass(frozen=True)
class Network:
    """A network between machines."""

    name: str
    gbit_per_second: float
    """Bandwidth in one direction."""
    per: str
    """"gpu" or "node": the unit that has its own port."""

    def __str__(self) -> str:
        return f"{self.name}, {self.gbit_per_second:g} Gb/s per {self.per}"


NETWORKS = {
    "ndr": Network("InfiniBand NDR", 400, "gpu"),
    "hdr": Network("InfiniBand HDR", 200, "gpu"),
    "ethernet-400": Network("Ethernet", 400, "node"),
    "ethernet-100": Network("Ethernet", 100, "node"),
    "ethernet-25": Network("Ethernet", 25, "node"),
    "ethernet-10": Network("Ethernet", 10, "node"),
}
_DEFAULT_NETWORK = "ethernet-100"
_PER_NODE = 8


@dataclass(frozen=True)
class Machines:
    """Identical machines."""

    accelerator: Accelerator
    count: int
    """Total number of accelerators; of workers on machines without any."""
    per_node: int
    network: Network | None
    """None for a single machine."""
    host_gib: float | None = None
    """Memory of one machine that its workers may use, besides that of accelerators; None if unknown."""
    host_bytes_per_second: float | None = None
    """Bandwidth of updates in that memory, all workers together; None if it was not measured."""

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return self.count // self.per_node

    def link_bytes_per_second(self) -> float | None:
        """Return the bandwidth between two accelerators of a machine, in one direction."""
        link = self.accelerator.link_gb_per_second
        return None if link is None else link * 1e9

    def network_bytes_per_second(self) -> float | None:
        """Return one accelerator's share of its machine's network bandwidth, in one direction."""
        if self.network is None:
            return None
        share = 1 if self.network.per == "gpu" else self.per_node
        return self.network.gbit_per_second * 1e9 / 8 / share

    def __str__(self) -> str:
        name = self.accelerator.device_name
        if self.nodes == 1:
            return f"{self.count} x {name}"
        return f"{self.nodes} machines of {self.per_node} x {name}"


def parse_machines(
    text: str,
    per_node: int | None = None,
    interconnect: str | None = None,
    memory_gib: float | None = None,
    *,
    host_gib: float | None = None,
) -> Machines:
    """Parse machines as the user types them: "8xH100", "64 x A100-40GB", "L4".

    Args:
        per_node: Accelerators per machine; by default 8, or all of them if there are fewer.
        interconnect: Key of `NETWORKS`; by default that of the vendor's machine, or Ethernet.
        memory_gib: Memory of an accelerator, instead of what is known; the speed of an unknown one remains unknown.
        host_gib: Memory of a machine besides that of its accelerators.

    Raises:
        ConfigError: the text cannot be parsed, the accelerator is unknown, machines would be unequal, or a single
            machine is given a network.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x*×]\s*)?([A-Za-z][\w .-]*?)\s*", text)
    count = int(match[1] or 1) if match else 0
    if match is None or count < 1:
        raise ConfigError(f"'{text}' does not name accelerators", where="--gpus", fix="for example --gpus 8xH100")
    accelerator = _accelerator(match[2], memory_gib)
    per_node = per_node or min(count, _PER_NODE)
    if count % per_node:
        raise ConfigError(
            f"{count} accelerators cannot be divided into machines with {per_node} each",
            where="--gpus, --per-node",
            fix=f"--gpus {-(-count // per_node) * per_node}x{accelerator.name}, or another --per-node",
        )
    if interconnect is not None and count == per_node:
        raise ConfigError(
            f"{count} accelerators are one machine, which needs no network",
            where="--interconnect",
            fix="leave it out, or give the accelerators of one machine with --per-node",
        )
    network = _network(accelerator, interconnect) if count > per_node else None
    return Machines(accelerator, count, per_node, network, host_gib)


def _accelerator(name: str, memory_gib: float | None) -> Accelerator:
    plain = {_plain(known): accelerator for known, accelerator in KNOWN.items()}
    found = plain.get(_plain(name))
    if found is not None:
        return found if memory_gib is None else replace(found, memory_gib=memory_gib)
    if memory_gib is not None:
        return Accelerator(name, name, memory_gib)
    near = get_close_matches(_plain(name), plain, n=1)
    hint = f"did you mean {plain[near[0]].name}? " if near else ""
    raise ConfigError(
        f"unknown accelerator '{name}'",
        where="--gpus",
        fix=f"{hint}give its memory with --memory-gib, or one of: {', '.join(KNOWN)}",
    )


def _plain(name: str) -> str:
    """Normalise a name: drop the parts that people write in different ways."""
    return re.sub(r"[^a-z0-9]|nvidia|sxm\d?|geforce|tesla|80gb|hbm\d\w?", "", name.lower())


def _network(accelerator: Accelerator, interconnect: str | None) -> Network:
    if interconnect is not None:
        if interconnect not in NETWORKS:
            raise ConfigError(
                f"unknown interconnect '{interconnect}'", where="--interconnect", fix=f"one of: {', '.join(NETWORKS)}"
            )
        return NETWORKS[interconnect]
    own = accelerator.network_gbit_per_second
    return next(
        (network for network in NETWORKS.values() if network.per == "gpu" and network.gbit_per_second == own),
        NETWORKS[_DEFAULT_NETWORK],
    )


def this_machine(
    workers: int,
    accelerators: bool = True,
    machine: Machine | None = None,
    *,
    memory_gib: float | None = None,
    host_gib: float | None = None,
) -> Machines:
    """Describe the accelerators of this machine, or its processor and available memory, divided by the workers.

    Args:
        workers: Workers on the processor.
        accelerators: Look for accelerators.
        machine: Where to look for the available memory.
        memory_gib: Memory of an accelerator, or of a worker on the processor, instead of what is found.
        host_gib: Memory besides that of accelerators, instead of what is found.
    """
    found = local_accelerators() if accelerators else []
    allowed = host_gib or allowed_bytes(machine or Machine()) / 2**30
    if not found:
        gib = memory_gib or allowed / workers
        return Machines(Accelerator("cpu", cpu_name(), gib, link="memory"), workers, workers, None)
    name, gib = found[0]
    gib = memory_gib or gib
    known = next((a for a in KNOWN.values() if a.device_name == name), Accelerator(name, name, gib))
    accelerator = replace(known, name=name, memory_gib=gib, network_gbit_per_second=None)
    return Machines(accelerator, len(found), len(found), None, allowed, kept_host_updates())

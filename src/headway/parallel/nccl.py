"""Profiles: which of NCCL's environment variables to set on a machine, and why.

NCCL detects most things itself. A profile sets what it cannot know (which of several networks is meant for training)
and what fails late or slowly if left to NCCL. It is a pure function of the interconnect; see
`interconnect.read_interconnect`. The NCCL user guide describes the variables under "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from headway.core.errors import ConfigError
from headway.parallel.interconnect import DISTANCES, Interconnect, RdmaPort

ProfileName = Literal["none", "ethernet", "infiniband", "roce", "nvlink"]
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

#: Algorithms in which switches of NVLink (NVLS) or InfiniBand (CollNet) add, in no guaranteed order.
_SWITCH_ALGORITHMS = "NVLS,NVLSTree,CollNetDirect,CollNetChain"
#: Variables that only enable such algorithms.
_SWITCH_VARIABLES = ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")


@dataclass(frozen=True)
class Setting:
    """One environment variable."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Profile:
    """The settings to apply, and why this profile was chosen."""

    name: ProfileName
    reason: str
    settings: tuple[Setting, ...] = ()
    left_open: tuple[str, ...] = ()
    """Variables that are not set, each with the reason."""

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables to add to an environment; variables that are already set stay as they are."""
        return {setting.name: setting.value for setting in self.settings if setting.name not in given}


def choose_profile(wanted: str, found: Interconnect, determinism: str = "off") -> Profile:
    """Choose the requested profile; `auto` chooses the best one that the machine supports.

    Args:
        determinism: Level of determinism of the run; unless it is "off", no profile lets switches add.

    Raises:
        ConfigError: the profile does not exist, or the machine lacks the hardware for it.
    """
    if wanted not in ("auto", *PROFILES):
        raise ConfigError(
            f"there is no NCCL profile '{wanted}'",
            where="parallel.nccl_profile",
            fix=f"one of auto, {', '.join(PROFILES)}",
        )
    if wanted == "auto" and found.gpus == 0:
        return Profile("none", "no GPU was found, so NCCL is not used")
    if wanted == "none":
        profile = Profile("none", "asked for")
    else:
        profile = _best(found) if wanted == "auto" else _MAKERS[wanted](found, "asked for")
    return profile if determinism == "off" else _with_fixed_order(profile)


def with_topology(profile: Profile, file: str | None, exists: bool) -> Profile:
    """Return the profile with the file that describes the machine to NCCL, if one is named.

    Args:
        profile: The profile.
        file: `parallel.nccl_topology`.
        exists: Whether this machine has it.

    Raises:
        ConfigError: it does not; NCCL would go on without a word.
    """
    if file is None:
        return profile
    if not exists:
        raise ConfigError(
            f"this machine has no file {file}",
            where="parallel.nccl_topology",
            fix="name the file that the cloud's image has, or leave it out: NCCL then asks the machine itself",
        )
    return replace(profile, settings=(*profile.settings, Setting("NCCL_TOPO_FILE", file, "named in the config")))


def _with_fixed_order(profile: Profile) -> Profile:
    """Return the profile without algorithms that add in a varying order.

    PyTorch itself excludes only NVLS, which leaves NVLSTree between machines.
    """
    algorithms = Setting(
        "NCCL_ALGO", f"^{_SWITCH_ALGORITHMS}", "switches add in any order, which determinism rules out"
    )
    settings = tuple(setting for setting in profile.settings if setting.name not in _SWITCH_VARIABLES)
    left_out = tuple(
        f"{setting.name}: it is for determinism=off ({setting.reason})"
        for setting in profile.settings
        if setting.name in _SWITCH_VARIABLES
    )
    return replace(profile, settings=(*settings, algorithms), left_open=(*profile.left_open, *left_out))


def _best(found: Interconnect) -> Profile:
    if found.nvlink_sharp:
        assert found.topology is not None
        return _nvlink(found, f"NVSwitch with {found.topology.nvlinks} links between any two GPUs")
    for kind, make in (("infiniband", _infiniband), ("roce", _roce)):
        ports = found.active_ports(kind)
        if ports:
            return make(found, f"{len(ports)} active {ports[0].link_layer} ports with RDMA")
    if any(port.kind == "other" and port.active for port in found.ports):
        return Profile(
            "none", "the network needs its vendor's plug-in for NCCL, which has its own settings (for example EFA)"
        )
    if found.socket_interface() is None:
        return Profile("none", "no usable network; the GPUs of this machine do not need one")
    return _ethernet(found, "no usable RDMA device")


def _ethernet(found: Interconnect, reason: str) -> Profile:
    interface = found.socket_interface()
    if interface is None:
        raise _lacks("ethernet", "no network interface is up and has an address")
    settings = [
        Setting("NCCL_IB_DISABLE", "1", "no RDMA: do not look for it"),
        *_socket_interface(found),
    ]
    speed = interface.megabits_per_second
    left_open = []
    if speed is not None and speed >= 100_000:
        # One TCP stream does not fill such a link; threads * sockets may be 64 at most.
        settings.append(Setting("NCCL_SOCKET_NTHREADS", "4", "one thread cannot fill 100 Gb/s"))
        settings.append(Setting("NCCL_NSOCKS_PERTHREAD", "4", "one TCP stream cannot fill 100 Gb/s"))
    elif speed is not None and speed >= 25_000:
        settings.append(Setting("NCCL_SOCKET_NTHREADS", "2", "one thread cannot fill 25 Gb/s"))
        settings.append(Setting("NCCL_NSOCKS_PERTHREAD", "2", "one TCP stream cannot fill 25 Gb/s"))
    elif speed is None:
        left_open.append(f"NCCL_SOCKET_NTHREADS: the speed of {interface.name} is unknown (NCCL knows some clouds)")
    return Profile("ethernet", reason, tuple(settings), tuple(left_open))


def _infiniband(found: Interconnect, reason: str) -> Profile:
    ports = found.active_ports("infiniband")
    if not ports:
        raise _lacks("infiniband", _why_no_ports(found, "infiniband"))
    settings, left_open = _rdma(found, ports)
    collnet = _collnet(found)
    return Profile("infiniband", reason, (*settings, *collnet), tuple(left_open))


def _roce(found: Interconnect, reason: str) -> Profile:
    ports = found.active_ports("roce")
    if not ports:
        raise _lacks("roce", _why_no_ports(found, "roce"))
    settings, left_open = _rdma(found, ports)
    indexes = {port.roce_v2_index for port in ports}
    index = next(iter(indexes))
    if len(indexes) == 1 and index is not None:
        settings.append(Setting("NCCL_IB_GID_INDEX", str(index), "RoCE v2 over IPv4 is at this index on every port"))
    else:
        left_open.append("NCCL_IB_GID_INDEX: RoCE v2 is at no common index, so NCCL looks for it on each port")
    return Profile("roce", reason, tuple(settings), tuple(left_open))


def _nvlink(found: Interconnect, reason: str) -> Profile:
    """Build the profile for NVLink within the machine and the best available network between machines."""
    if found.topology is None:
        raise _lacks("nvlink", "nvidia-smi reports no GPUs and no links between them")
    if not found.topology.nvlinks:
        raise _lacks("nvlink", "there are fewer than two GPUs, or a pair has no NVLink between them")
    settings: list[Setting] = []
    left_open: list[str] = []
    if found.active_ports("infiniband"):
        network = _infiniband(found, "")
    elif found.active_ports("roce"):
        network = _roce(found, "")
    elif found.socket_interface() is not None and not any(p.kind == "other" and p.active for p in found.ports):
        network = _ethernet(found, "")
    else:
        network = Profile("none", "")
    if found.nvlink_sharp:
        # 2, unlike 1, still checks with the driver: under some hypervisors switches cannot reduce.
        settings.append(Setting("NCCL_NVLS_ENABLE", "2", "NVLink switches can reduce (SHARP), if the driver agrees"))
    else:
        left_open.append("NCCL_NVLS_ENABLE: no switch that can reduce; this needs NVSwitch, Hopper and three GPUs")
    return Profile("nvlink", reason, (*settings, *network.settings), (*left_open, *network.left_open))


_MAKERS = {"ethernet": _ethernet, "infiniband": _infiniband, "roce": _roce, "nvlink": _nvlink}


def _rdma(found: Interconnect, ports: tuple[RdmaPort, ...]) -> tuple[list[Setting], list[str]]:
    left_open: list[str] = []
    devices = ",".join(f"{port.device}:{port.port}" for port in ports)
    speed = ports[0].gigabits_per_second
    rate = "an unknown rate" if speed is None else f"{speed:g} Gb/s"
    settings = [
        Setting("NCCL_IB_DISABLE", "0", "RDMA is available"),
        Setting("NCCL_IB_HCA", f"={devices}", f"the active ports of {rate}; slower ones are not for training"),
    ]
    if found.gpudirect is None:
        settings.append(Setting("NCCL_NET_GDR_LEVEL", "LOC", "no nvidia_peermem and no DMA-BUF: GPUDirect cannot work"))
    else:
        ways = found.topology.to_network.values() if found.topology else ()
        farthest = max(ways, key=DISTANCES.index, default=None)
        if farthest in ("PIX", "PXB", "PHB"):
            level = "PHB" if farthest == "PHB" else "PXB"
            reason = f"GPUDirect through {found.gpudirect}: no GPU is farther than {farthest} from a port"
            settings.append(Setting("NCCL_NET_GDR_LEVEL", level, reason))
        else:
            why = (
                "the location of GPUs and ports is unknown"
                if farthest is None
                else f"a GPU is {farthest} from every port"
            )
            left_open.append(f"NCCL_NET_GDR_LEVEL: {why}, so NCCL judges each pair")
    settings.extend(_socket_interface(found))
    return settings, left_open


def _socket_interface(found: Interconnect) -> list[Setting]:
    interface = found.socket_interface()
    if interface is None:
        return []
    speed = interface.megabits_per_second
    how = "speed unknown" if speed is None else f"{speed / 1000:g} Gb/s"
    which = "the fastest interface" if interface.has_hardware else "the interface with the default route"
    return [Setting("NCCL_SOCKET_IFNAME", f"={interface.name}", f"{which} that is up and has an address ({how})")]


def _collnet(found: Interconnect) -> list[Setting]:
    if found.sharp_library is None:
        return []
    return [Setting("NCCL_COLLNET_ENABLE", "1", f"InfiniBand switches can reduce: {found.sharp_library}")]


def _why_no_ports(found: Interconnect, kind: str) -> str:
    ports = [port for port in found.ports if port.kind == kind]
    if not ports:
        return f"there is no {'InfiniBand' if kind == 'infiniband' else 'RoCE'} device"
    if not any(port.active for port in ports):
        return f"no port is active: {', '.join(f'{port.device}:{port.port} {port.state}' for port in ports)}"
    return "programs cannot open /dev/infiniband"


def _lacks(profile: str, what: str) -> ConfigError:
    return ConfigError(
        f"the NCCL profile '{profile}' does not fit this machine: {what}",
        where="parallel.nccl_profile",
        fix="parallel.nccl_profile=auto, or see: headway doctor",
    )

"""Which NCCL profile is chosen on recorded machines, and what it sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.machine.system import Output
from headway.parallel.interconnect import Interconnect, parse_topology, read_interconnect
from headway.parallel.nccl import Profile, choose_profile
from support.doctor import (
    CAPABILITY,
    CLOUD,
    CONTAINER,
    H100,
    LAPTOP,
    TOPOLOGY,
    Recorded,
    interface,
    rdma,
    routes,
    topology,
)

#: RoCE cards beside two GPUs without NVLink.
ROCE = CLOUD.but(
    files={
        **rdma("mlx5_0", layer="Ethernet", rate=100),
        **rdma("mlx5_1", layer="Ethernet", rate=100),
        "/dev/infiniband/uverbs0": "",
        "/sys/module/nvidia_peermem/": "",
    },
    commands={TOPOLOGY: topology(2, 2, link="PHB", near="PHB", far="SYS")},
)
#: InfiniBand cards beside eight A100 on NVSwitch, which cannot reduce.
A100 = H100.but(commands={CAPABILITY: Output("ok", "8.0\n" * 8), TOPOLOGY: topology(8, 9, link="NV12")})


def found(machine: Recorded, folder: Path) -> Interconnect:
    return read_interconnect(machine.machine(folder))


def settings(profile: Profile) -> dict[str, str]:
    assert all(setting.reason for setting in profile.settings)
    return {setting.name: setting.value for setting in profile.settings}


IB_PORTS = "=" + ",".join(f"mlx5_{n}:1" for n in range(8))


def test_nvlink_with_sharp_comes_first_and_brings_the_network(tmp_path: Path) -> None:
    profile = choose_profile("auto", found(H100, tmp_path))
    assert profile.name == "nvlink"
    assert settings(profile) == {
        "NCCL_NVLS_ENABLE": "2",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": IB_PORTS,
        "NCCL_NET_GDR_LEVEL": "PXB",
        "NCCL_SOCKET_IFNAME": "=bond0",
    }


@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_switches_do_not_add_where_bits_are_promised(determinism: str, tmp_path: Path) -> None:
    """PyTorch alone would rule out NVLS within a machine, and neither NVLSTree between machines nor CollNet."""
    libraries = {"/lib/libnccl-net.so": "", "/lib/libsharp_coll.so.5": ""}
    machine = found(H100.but(files=libraries, environment={"LD_LIBRARY_PATH": "/lib"}), tmp_path)
    for wanted in ("auto", "infiniband", "none"):
        free, promised = choose_profile(wanted, machine, "off"), choose_profile(wanted, machine, determinism)
        dropped = {name for name in settings(free) if name in ("NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE")}
        assert len(dropped) == {"auto": 2, "infiniband": 1, "none": 0}[wanted]
        kept = {name: value for name, value in settings(free).items() if name not in dropped}
        assert settings(promised) == {**kept, "NCCL_ALGO": "^NVLS,NVLSTree,CollNetDirect,CollNetChain"}
        assert promised.name == free.name and "NCCL_ALGO" not in settings(free)
        assert {left.split(":")[0] for left in promised.left_open if "determinism=off" in left} == dropped
        assert "NCCL_ALGO" not in promised.environment({"NCCL_ALGO": "Tree"}), "the user's"


def test_infiniband_without_switches_that_reduce(tmp_path: Path) -> None:
    profile = choose_profile("auto", found(A100, tmp_path))
    assert profile.name == "infiniband"
    assert settings(profile)["NCCL_IB_HCA"] == IB_PORTS, "the storage card of 100 Gb/s is left out"
    assert "NCCL_NVLS_ENABLE" not in settings(profile)
    asked = choose_profile("nvlink", found(A100, tmp_path))
    assert "NCCL_NVLS_ENABLE" not in settings(asked)
    assert any("NCCL_NVLS_ENABLE" in left for left in asked.left_open)


def test_sharp_in_the_network_only_where_its_library_is(tmp_path: Path) -> None:
    folder = "/opt/hpcx/lib"
    libraries = {f"{folder}/libnccl-net.so": "", f"{folder}/libsharp_coll.so.5": ""}
    with_sharp = A100.but(files=libraries, environment={"LD_LIBRARY_PATH": f"/nowhere:{folder}"})
    assert settings(choose_profile("auto", found(with_sharp, tmp_path / "a")))["NCCL_COLLNET_ENABLE"] == "1"
    plugin_alone = with_sharp.but(files={f"{folder}/libsharp_coll.so.5": None})
    assert "NCCL_COLLNET_ENABLE" not in settings(choose_profile("auto", found(plugin_alone, tmp_path / "b")))


def test_roce(tmp_path: Path) -> None:
    profile = choose_profile("auto", found(ROCE, tmp_path))
    assert profile.name == "roce"
    assert settings(profile) == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "NCCL_IB_GID_INDEX": "3",
    }


def test_roce_ports_that_differ_are_left_to_nccl(tmp_path: Path) -> None:
    types = "/sys/class/infiniband/mlx5_1/ports/1/gid_attrs/types"
    mixed = ROCE.but(files={f"{types}/2": "RoCE v2"})
    profile = choose_profile("auto", found(mixed, tmp_path))
    assert profile.name == "roce" and "NCCL_IB_GID_INDEX" not in settings(profile)
    assert any("NCCL_IB_GID_INDEX" in left for left in profile.left_open)


def test_without_gpudirect_nccl_does_not_try_it(tmp_path: Path) -> None:
    without = H100.but(files={"/sys/module/nvidia_peermem/": None})
    assert settings(choose_profile("infiniband", found(without, tmp_path)))["NCCL_NET_GDR_LEVEL"] == "LOC"


@pytest.mark.parametrize("output", [topology(8, 9, link="NV18", near="SYS"), Output("failed")])
def test_gpudirect_over_unknown_or_long_ways_is_left_to_nccl(output: Output, tmp_path: Path) -> None:
    profile = choose_profile("infiniband", found(H100.but(commands={TOPOLOGY: output}), tmp_path))
    assert "NCCL_NET_GDR_LEVEL" not in settings(profile)
    assert any("NCCL_NET_GDR_LEVEL" in left for left in profile.left_open)


@pytest.mark.parametrize(
    ("speed", "threads"),
    [(200_000, {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}),
     (25_000, {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"}),
     (10_000, {}), (-1, {})],
)  # fmt: skip
def test_ethernet(speed: int, threads: dict[str, str], tmp_path: Path) -> None:
    machine = CLOUD.but(files=interface("ens5", speed=speed))
    profile = choose_profile("auto", found(machine, tmp_path))
    assert profile.name == "ethernet"
    assert settings(profile) == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=ens5", **threads}
    assert bool(profile.left_open) == (speed == -1)


def test_rdma_that_cannot_be_opened_is_not_chosen(tmp_path: Path) -> None:
    closed = ROCE.but(files={"/dev/infiniband/uverbs0": None})
    assert choose_profile("auto", found(closed, tmp_path)).name == "ethernet"
    with pytest.raises(ConfigError, match="cannot open /dev/infiniband"):
        choose_profile("roce", found(closed, tmp_path / "again"))


def test_a_maker_s_plug_in_keeps_its_own_settings(tmp_path: Path) -> None:
    efa = CLOUD.but(files={**rdma("efa_0", layer="Unspecified", rate=100), "/dev/infiniband/uverbs0": ""})
    profile = choose_profile("auto", found(efa, tmp_path))
    assert profile.name == "none" and "EFA" in profile.reason


@pytest.mark.parametrize("machine", [LAPTOP, CONTAINER])
def test_nothing_is_set_without_gpus(machine: Recorded, tmp_path: Path) -> None:
    assert choose_profile("auto", found(machine, tmp_path)).settings == ()


@pytest.mark.parametrize(
    ("wanted", "machine", "said"),
    [
        ("infiniband", CLOUD, "there is no InfiniBand device"),
        ("roce", H100, "there is no RoCE device"),
        ("roce", ROCE.but(files={**rdma("mlx5_0", layer="Ethernet", state="1: DOWN"),
                                 **rdma("mlx5_1", layer="Ethernet", state="1: DOWN")}), "mlx5_0:1 DOWN"),
        ("nvlink", CLOUD, "no NVLink between them"),
        ("nvlink", LAPTOP, "nvidia-smi reports no GPUs"),
        ("ethernet", CLOUD.but(files={"/proc/net/route": ""}), "no network interface is up"),
        ("fast", CLOUD, "there is no NCCL profile 'fast'"),
    ],
)  # fmt: skip
def test_a_profile_that_does_not_fit_is_refused(wanted: str, machine: Recorded, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        choose_profile(wanted, found(machine, tmp_path))
    assert refused.value.where == "parallel.nccl_profile" and "auto" in (refused.value.fix or "")


def test_none_sets_nothing(tmp_path: Path) -> None:
    assert choose_profile("none", found(H100, tmp_path)).settings == ()


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    profile = choose_profile("ethernet", found(CLOUD, tmp_path))
    added = profile.environment({"NCCL_SOCKET_IFNAME": "eth9", "NCCL_IB_DISABLE": ""})
    assert added == {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "ens5"),
        (interface("ens6", speed=400_000), "ens6"),
        ({**interface("ens6", speed=400_000), "/proc/net/route": routes("ens5")}, "ens5"),  # ens6 has no address
        ({**interface("ens6", speed=100_000), "/proc/net/route": routes("ens6", "ens5")}, "ens6"),  # the default route
        (interface("veth1", speed=400_000, real=False) | {"/proc/net/route": routes("ens5", "veth1")}, "ens5"),
        (interface("ens5", up=False), None),
        ({"/proc/net/route": "", "/proc/net/if_inet6": f"{'20010db8':0<32} 03 40 00 80 ens5"}, "ens5"),
        ({"/proc/net/route": "", "/proc/net/if_inet6": f"{'fe80':0<32} 03 40 20 80 ens5"}, None),
    ],
)
def test_the_interface_for_sockets(changes: dict[str, str], chosen: str | None, tmp_path: Path) -> None:
    interface = found(CLOUD.but(files=changes), tmp_path).socket_interface()
    assert (interface.name if interface else None) == chosen


def test_a_container_s_virtual_cable_is_used_when_it_is_the_way_out(tmp_path: Path) -> None:
    chosen = found(CONTAINER, tmp_path / "a").socket_interface()
    assert chosen is not None and chosen.name == "eth0"
    inside = CONTAINER.but(files={"/proc/net/route": routes("other", "eth0")})
    assert found(inside, tmp_path / "b").socket_interface() is None


@pytest.mark.parametrize(
    ("gpus", "link", "nvlinks", "switched"),
    [
        (8, "NV18", 18, True),
        (8, "NV12", 12, True),
        (4, "NV6", 6, False),  # three neighbours with six links each: no switch is needed for that
        (2, "NV18", 18, False),  # nor for two that share all they have
        (2, "SYS", 0, False),
        (1, "X", 0, False),
    ],
)
def test_links_between_gpus(gpus: int, link: str, nvlinks: int, switched: bool) -> None:
    matrix = parse_topology(topology(gpus, 1, link=link).text)
    assert matrix is not None
    assert len(matrix.gpus) == gpus and matrix.nvlinks == nvlinks and matrix.is_switched == switched


def test_one_pair_without_nvlink_counts_as_none() -> None:
    text = """\tGPU0\tGPU1\tGPU2\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tNODE\t0-15\t0
GPU1\tNV4\t X \tNV4\tPIX\t0-15\t0
GPU2\tSYS\tNV4\t X \tSYS\t16-31\t1
mlx5_0\tNODE\tPIX\tSYS\t X
"""
    matrix = parse_topology(text)
    assert matrix is not None and matrix.nvlinks == 0
    assert matrix.between_gpus["GPU0", "GPU1"] == "NV4"
    assert matrix.to_network == {"GPU0": "NODE", "GPU1": "PIX", "GPU2": "SYS"}
    assert parse_topology("No devices were found") is None

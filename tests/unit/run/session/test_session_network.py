"""When workers get NCCL's settings, and that machines which would not meet are told apart."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headway.config import Config, MeshShape
from headway.core.errors import ConfigError
from headway.core.machine.system import Output
from headway.parallel.nccl import PROFILES, Profile
from headway.run.session import join, network
from headway.run.session.network import apply_nccl_profile, assert_same_profile
from support.doctor import CAPABILITY, CLOUD


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One of two workers, with a GPU each."""
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(network, "pick_device", lambda wanted, rank: torch.device("cuda", rank))
    return monkeypatch


def test_workers_on_gpus_get_the_profile(workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = {"NCCL_SOCKET_NTHREADS": "1"}
    profile = apply_nccl_profile("auto", "cuda", "off", CLOUD.machine(tmp_path), environment)
    assert profile.name == "ethernet"
    assert environment == {
        "NCCL_SOCKET_NTHREADS": "1",  # the user's
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "=ens5",
        "NCCL_NSOCKS_PERTHREAD": "4",
    }
    apply_nccl_profile("none", "cuda", "run", CLOUD.machine(tmp_path), promised := dict[str, str]())
    assert list(promised) == ["NCCL_ALGO"], "the promise does not depend on the network"


def test_cuda_counts_even_where_nvidia_smi_is_missing(workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    workers.setattr(torch.cuda, "device_count", lambda: 2)
    blind = CLOUD.but(commands={CAPABILITY: Output("missing")})
    assert apply_nccl_profile("auto", "cuda", "run", blind.machine(tmp_path), {}).name == "ethernet"


def test_cpu_workers_and_lone_ones_get_nothing(workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine, environment = CLOUD.machine(tmp_path), dict[str, str]()
    workers.setattr(network, "pick_device", lambda wanted, rank: torch.device("cpu"))
    assert apply_nccl_profile("ethernet", "cpu", "run", machine, environment).settings == ()
    workers.setattr(network, "pick_device", lambda wanted, rank: torch.device("cuda", rank))
    workers.setenv("WORLD_SIZE", "1")
    assert apply_nccl_profile("ethernet", "cuda", "run", machine, environment).settings == ()
    assert environment == {}


def test_the_file_with_the_topology_is_named_to_nccl_and_a_missing_one_is_refused(
    workers: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, environment = tmp_path / "topology.xml", dict[str, str]()
    with pytest.raises(ConfigError, match="has no file"):
        apply_nccl_profile("auto", "cuda", "off", CLOUD.machine(tmp_path), environment, topology=str(file))
    file.write_text("<system/>")
    apply_nccl_profile("auto", "cuda", "off", CLOUD.machine(tmp_path), environment, topology=str(file))
    assert environment["NCCL_TOPO_FILE"] == str(file)


def test_a_profile_that_does_not_fit_ends_the_run(workers: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no InfiniBand device"):
        apply_nccl_profile("infiniband", "cuda", "run", CLOUD.machine(tmp_path), {})
    workers.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="'first' is no number from 0 to 1"):
        apply_nccl_profile("auto", "cuda", "run", CLOUD.machine(tmp_path), {})


@dataclass
class Others:
    """A world whose other workers say what they are told to."""

    said: list[str]

    def gather(self, values: list[float]) -> list[list[float]]:
        return [values, *([float(PROFILES.index(name))] for name in self.said)]  # type: ignore[arg-type]


def test_machines_on_different_networks_are_refused() -> None:
    mine = Profile("infiniband", "for a test")
    assert_same_profile(Others(["infiniband"]), mine)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="worker 0 has 'infiniband', worker 2 has 'ethernet'"):
        assert_same_profile(Others(["infiniband", "ethernet"]), mine)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "all_sizes"), [("cpu", True), ("cuda", False)])
def test_blocks_of_all_sizes_are_kept_where_the_cpu_trains(
    workers: pytest.MonkeyPatch, device: str, all_sizes: bool
) -> None:
    """Elsewhere the large ones in host memory are copies of a state, which should go for good."""
    kept: list[bool] = []
    joined = SimpleNamespace(device=torch.device(device), connect_groups=lambda: None)
    for name in ("apply_determinism", "apply_nccl_profile", "assert_same_profile", "check_available"):
        workers.setattr(join, name, lambda *_, **__: None)
    workers.setattr(join, "keep_freed_memory", lambda *, of_all_sizes: kept.append(of_all_sizes))
    workers.setattr(join, "open_world", lambda *_: nullcontext(joined))
    with join.join_workers(Config(), MeshShape()):
        assert kept == [all_sizes]


def test_nccl_connects_workers_only_when_they_are_known_to_reach_each_other(workers: pytest.MonkeyPatch) -> None:
    """Those of different networks would wait for each other there, and nobody would say why."""
    order: list[str] = []

    class Joined:
        device = torch.device("cuda", 0)

        def connect_groups(self) -> None:
            order.append("connected")

    for name in ("apply_determinism", "keep_freed_memory", "apply_nccl_profile"):
        workers.setattr(join, name, lambda *_, **__: None)
    workers.setattr(join, "open_world", lambda *_: nullcontext(Joined()))
    workers.setattr(join, "assert_same_profile", lambda *_: order.append("compared"))
    workers.setattr(join, "check_available", lambda *_: order.append("looked at"))
    with join.join_workers(Config(), MeshShape(dp_shard=2)):
        assert order == ["compared", "looked at", "connected"]

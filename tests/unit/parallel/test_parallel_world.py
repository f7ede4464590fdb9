"""How a worker finds the others."""

import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from headway.config import MeshShape
from headway.core.errors import ConfigError, HeadwayError
from headway.parallel import world
from headway.parallel.world import World, _agree_on_name, open_world
from support.gpu import needs_gpu

PLACE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", "2", "'2' is no number from 0 to 1"),  # counted from 1
        ("RANK", "first", "'first' is no number"),
        ("LOCAL_RANK", "", "'' is no number"),
        ("MASTER_PORT", "http", "'http' is no number"),
        ("MASTER_PORT", None, "2 workers were started without an address to meet at"),
        ("MASTER_ADDR", None, "2 workers were started without an address to meet at"),
    ],
)
def test_variables_that_do_not_fit_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, what: str
) -> None:
    for variable, given in {**PLACE, name: value}.items():
        if given is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, given)
    with pytest.raises(ConfigError, match=what) as told, open_world("cpu", 1):
        pass
    assert told.value.where == name


def test_workers_that_do_not_come_are_told_of_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for variable, given in {**PLACE, "RANK": "0", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(variable, given)
        with pytest.raises(HeadwayError, match="worker 0 of 2 did not meet the others: ") as told, open_world("cpu", 5):
            pass
        if "EADDRINUSE" not in told.value.what:  # another process was quicker to take the port
            break
    assert "1/2" in told.value.what
    assert type(told.value) is HeadwayError and told.value.where == f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"


def test_workers_that_are_started_again_do_not_take_the_words_of_those_before() -> None:
    store, names = dist.HashStore(), set[str]()
    for round_ in range(3):
        store.set("headway/word-2", f"of a worker that is gone {round_}")
        with ThreadPoolExecutor(3) as pool:
            found = set(pool.map(lambda rank: _agree_on_name(store, rank, 3, 10.0), range(3)))
        assert len(found) == 1
        names |= found
    assert len(names) == 3
    with pytest.raises(dist.DistStoreError, match="1/3 workers came"):
        _agree_on_name(store, 0, 3, 0.1)


def test_in_a_store_that_outlives_its_workers_these_agree_on_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, given in {**PLACE, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(variable, given)

    def agree(store: object, rank: int, size: int, timeout_seconds: float) -> str:
        raise KeyError(rank, size, timeout_seconds)

    place = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    monkeypatch.setattr(place, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(world, "_agree_on_name", agree)
    with pytest.raises(KeyError, match="1, 2, 7"), open_world("cpu", 7):
        pass


def test_nccl_connects_the_workers_of_a_group_before_a_backward_pass_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, connected = {"replicas": 2, "stage": 4, "experts": 1, None: 8}, list[object]()
    monkeypatch.setattr(dist, "get_world_size", sizes.__getitem__)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: connected.append((tensor, group)))
    monkeypatch.setattr(torch, "zeros", lambda size, device: (size, device.type))

    def connect(device: str, mesh: MeshShape, **groups: str | None) -> list[object]:
        connected.clear()
        worker = World(0, 8, 0, torch.device(device), mesh)
        vars(worker).update(groups)
        worker.connect_groups()
        return list(connected)

    mesh, groups = MeshShape(pp=2, dp_shard=4, ep=4), {"replica_group": "replicas", "_stage_group": "stage"}
    expected = [((1, "cuda"), "replicas"), ((1, "cuda"), "stage")]
    assert connect("cuda", mesh, **groups, expert_replica_group="experts") == expected  # a group of one talks to nobody
    assert connect("cuda", MeshShape(dp_shard=8)) == [((1, "cuda"), None)]
    assert connect("cpu", mesh, **groups, expert_replica_group="experts") == []


def test_seeding_draws_what_pytorchs_does_without_a_look_at_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(2**62 + 1)
    expected = torch.rand(4)

    def look(*_: object) -> None:
        raise AssertionError("a stack was written down, which takes most of the time of seeding")

    monkeypatch.setattr(traceback, "format_stack", look)
    World(0, 1, 0, torch.device("cpu")).seed(2**62 + 1)
    assert torch.equal(torch.rand(4), expected)


@needs_gpu
def test_seeding_reaches_the_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    World(0, 1, 0, device).seed(3)
    assert torch.equal(torch.rand(4, device=device), expected)

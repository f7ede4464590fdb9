"""A checkpoint gets to machines that do not see the first one's disk, and data are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoint.remote.relay import Relay
from headway.checkpoint.remote_copies import TierAccess
from headway.checkpoint.run_identity import OF_RUN, RunIdentity
from headway.checkpoint.store import CheckpointStore
from headway.core.errors import CheckpointError, DataError
from headway.parallel.world import World
from headway.run.session.own_disks import CheckpointAccess, check_same_code, check_same_data
from support.states import equal, make_state


class Others(World):
    """A world of two machines with one worker each, in which the first one says something."""

    says: Any = None

    def gather_json(self, value: Any) -> list[Any]:
        if self.rank == 0:
            type(self).says = value
        return [type(self).says, value]

    def barrier(self) -> None:
        pass


def world(rank: int) -> Others:
    return Others(rank, 2, 0, torch.device("cpu"))


@pytest.fixture
def access(tmp_path: Path) -> list[CheckpointAccess]:
    """The access of the first worker, who has steps 2 and 4, and of the other, who has nothing."""
    (tmp_path / "remote").mkdir()
    remote = {"url": f"file://{tmp_path}/remote", "options": {}, "encrypt": False}
    found: list[CheckpointAccess] = []
    for rank, machine in enumerate(("a", "b")):
        run = tmp_path / machine / "tiny"
        run.mkdir(parents=True)
        identity = RunIdentity(run, "0" * 32, "tiny")
        if rank == 0:
            claim = TierAccess(run, remote, identity, 1).open().claim
            assert claim is not None
        relay = Relay(run, remote, claim, identity, first_rank=1)
        found.append(CheckpointAccess(CheckpointStore(run / "checkpoints"), world(rank), relay))
    for step in (2, 4):
        context = {OF_RUN: {"id": "0" * 32, "name": "tiny", "seed": None}}
        found[0].store.save(step, make_state(step), {"step": step}, context)
    return found


def test_the_first_worker_publishes_what_the_others_fetch(access: list[CheckpointAccess], tmp_path: Path) -> None:
    first, other = access
    for step in (4, 2, 2):
        assert first.info(step).step == other.info(step).step == step
        assert equal(other.store.load(other.store.info(step)), make_state(step))
        assert [info.step for info in other.store.list()] == [step], "no more than is needed"
    assert sorted(path.parent.name for path in (tmp_path / "remote").rglob("manifest.json")) == [
        "step-00000002",
        "step-00000004",
    ]


def test_a_good_copy_is_used_again_and_a_damaged_one_is_not(access: list[CheckpointAccess]) -> None:
    first, other = access
    first.info(2), other.info(2)
    (shard,) = other.store.info(2).path.glob("*.safetensors")
    before = shard.stat().st_ino
    first.info(2), other.info(2)
    assert shard.stat().st_ino == before
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    first.info(2)
    assert equal(other.store.load(other.info(2)), make_state(2))


def test_another_state_of_the_step_is_not_taken(access: list[CheckpointAccess]) -> None:
    first, other = access
    first.info(2)
    Others.says = "f" * 64
    with pytest.raises(CheckpointError, match="does not have the checkpoint of step 2 that the first machine"):
        other.info(2)


def test_machines_with_other_data_are_refused() -> None:
    check_same_data(world(0), {"data": "d" * 64})
    check_same_data(world(1), {"data": "d" * 64})
    with pytest.raises(DataError, match=r"the data fingerprint of .* is eeeeeeeeeeee, and that of .* is dddddddddddd"):
        check_same_data(world(1), {"data": "e" * 64})


def test_machines_with_other_code_are_refused() -> None:
    """Code that computes must be the same, by the rules that compare it with that of a checkpoint."""
    code = {"loss": "a" * 64, "optimizer.name": "python-3.11:" + "b" * 64, "callbacks own:Log": "c" * 64}
    check_same_code(world(0), code)
    check_same_code(world(1), code)
    for key in ("loss", "optimizer.name"):
        version, _, _ = code[key].rpartition(":")
        other = {**code, key: f"{version}:{'e' * 64}".lstrip(":")}
        with pytest.raises(DataError, match=rf"the code of {key} on .* is (python-3\.11:)?eeeeeeeeeeee, and that on"):
            check_same_code(world(1), other)
    with pytest.raises(DataError, match=r"the code of loss on .* is none"):
        check_same_code(world(1), {key: value for key, value in code.items() if key != "loss"})
    with pytest.raises(DataError, match=r"the code of model on .* is dddddddddddd, and that on .* is none"):
        check_same_code(world(1), {**code, "model": "d" * 64})
    # Another version of Python compiles other bytes, and callbacks compute nothing.
    check_same_code(world(1), {**code, "optimizer.name": "python-3.12:" + "e" * 64, "callbacks own:Log": "e" * 64})


def test_the_first_worker_reports_code_that_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    class First(Others):
        def gather_json(self, value: Any) -> list[Any]:
            return [value, {"host": "b", "code": {"callbacks own:Log": "e" * 64}}]

    check_same_code(First(0, 2, 0, torch.device("cpu")), {"callbacks own:Log": "c" * 64})
    assert "the code of callbacks own:Log on b is eeeeeeeeeeee, and that on" in capsys.readouterr().err

"""Of several workers, the one whose gradient or weights have a wrong bit is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import headway, manifest, state_hash


def test_the_worker_that_differs_is_named_and_nothing_of_it_is_saved(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(health={"replay_every": 2}, checkpoint={"every": "1 steps"})
    found = headway("train", config, "-w", "2", "name=found", faults="flip@replay.1=4")
    assert found.returncode == 1 and "step 4 was computed twice, and the gradient of" in found.stderr
    # Both workers end with the same error; which of the two is seen to have died first is chance.
    assert "differs on worker 1 (" in found.stderr and "differs on worker 0" not in found.stderr, found.stderr
    assert manifest(tmp_path / "runs/found")["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("determinism", ["run", "elastic"])
def test_a_replay_leaves_no_trace_whatever_the_strategy(
    tiny: Callable[..., Path], tmp_path: Path, strategy: str, determinism: str
) -> None:
    config = tiny(parallel={"strategy": strategy}, determinism=determinism, train={"lanes": 4})
    for every in (0, 1):
        done = headway("train", config, f"name=r{every}", f"health.replay_every={every}", "-w", "2")
        assert done.returncode == 0, done.stderr
    assert state_hash(tmp_path / "runs/r0") == state_hash(tmp_path / "runs/r1")
    wrong = headway(
        "train", config, "name=w", "health.replay_every=2", "-w", "2", faults="flip@weights.1=4,flip@replay.1=6"
    )
    assert wrong.returncode == 1
    # With cut weights nobody has a second one to compare with.
    expected = "not what it is on other workers" if strategy in ("ddp", "zero1", "zero2") else "was computed twice"
    assert expected in wrong.stderr, wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor", "context", "pipeline"])
def test_a_replay_leaves_no_trace_where_workers_share_a_model(
    tiny: Callable[..., Path], tmp_path: Path, split: str
) -> None:
    config = tiny(parallel={split: 2})
    for every in (0, 1):
        done = headway("train", config, f"name=r{every}", f"health.replay_every={every}", "-w", "2")
        assert done.returncode == 0, done.stderr
    assert state_hash(tmp_path / "runs/r0") == state_hash(tmp_path / "runs/r1")

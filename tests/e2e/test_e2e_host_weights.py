"""Runs with weights in bf16 and masters in host memory: kills, saves from where they lie, changes of the config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.store import CheckpointStore
from support.runs import headway, manifest, state_hash

WEIGHTS = {"weights": "bf16", "precision": "bf16"}
#: Moments at which a run is killed, saves among them.
MOMENTS = (
    "kill@gradient=1",
    "kill@backward=2",
    "kill@checkpoint.stage:1",
    "kill@update=3",
    "kill-group@checkpoint.shard:1",
    "kill@step=4",
    "kill-group@checkpoint.manifest:1",
    "kill@reduce=6",
    "kill-group@checkpoint.rename:1",
    "kill@compute=8",
)


def killed_and_resumed(config: Path, folder: Path, moments: tuple[str, ...], *options: str) -> None:
    """Kill a run at every moment, resume it each time, and compare its state with that of one that was left alone."""
    done = headway("train", config, "name=whole", *options)
    assert done.returncode == 0, done.stderr
    for moment in moments:
        killed = headway("train", config, "name=killed", *options, faults=moment)
        assert killed.returncode == 1 and "died (signal 9)" in killed.stderr, (moment, killed.stderr)
    resumed = headway("train", config, "name=killed", *options)
    assert resumed.returncode == 0 and "resuming from" in resumed.stderr, resumed.stderr
    assert state_hash(folder / "runs/killed") == state_hash(folder / "runs/whole")


def test_killed_and_resumed_it_has_the_same_state(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """On a slow disk, for which the next update has to wait."""
    config = tiny(train={**WEIGHTS, "steps": 6, "global_batch": 2}, checkpoint={"every": "1 steps", "keep": 6})
    killed_and_resumed(config, tmp_path, ("kill@update=5,slow@checkpoint.shard",))
    assert {entry["dtype"] for entry in manifest(tmp_path / "runs/whole")["tensors"].values()} == {"F32"}
    store = CheckpointStore(tmp_path / "runs/killed/checkpoints")
    for step in range(1, 7):
        assert store.verify(step).good
        assert state_hash(tmp_path / "runs/killed", step) == state_hash(tmp_path / "runs/whole", step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("parallel.workers=2", "parallel.strategy=zero2"), ("parallel.workers=2", "parallel.strategy=zero3")],
    ids=str,
)
def test_killed_at_ten_moments(tiny: Callable[..., Path], tmp_path: Path, options: tuple[str, ...]) -> None:
    config = tiny(train={**WEIGHTS, "steps": 12}, optimizer={"moments": "bf16"})
    killed_and_resumed(config, tmp_path, MOMENTS, *options)


def test_a_run_with_fp32_weights_goes_on_in_bf16(tiny: Callable[..., Path], tmp_path: Path) -> None:
    before: dict[str, Any] = {"precision": "bf16", "steps": 4}
    assert headway("train", tiny(train=before)).returncode == 0
    changed = tiny(train={**WEIGHTS, "steps": 8})
    refused = headway("train", changed)
    assert refused.returncode == 2 and "train.weights was not set and is now bf16" in refused.stderr, refused.stderr
    done = headway("train", changed, "--accept-changes")
    assert done.returncode == 0 and "resuming from" in done.stderr, done.stderr
    back = headway("train", tiny(train={**before, "steps": 10}), "--accept-changes")
    assert back.returncode == 0, back.stderr
    assert manifest(tmp_path / "runs/tiny")["cursor"]["step"] == 10


@pytest.mark.slow
def test_a_rollback_goes_back_to_a_state_without_moments(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The first state has no moments, so the buffer in which the next ones lie has another layout."""
    config = tiny(train=WEIGHTS, health={"on_nonfinite": "rollback"})
    faults = "nan@gradient=1,nan@gradient=7"
    done = headway("train", config, "name=whole", faults=faults)
    assert done.returncode == 0 and done.stderr.count("going back to step") == 2, done.stderr
    killed = headway("train", config, "name=killed", faults=f"{faults},kill@update=9")
    assert killed.returncode == 1, killed.stderr
    assert headway("train", config, "name=killed").returncode == 0
    assert state_hash(tmp_path / "runs/killed") == state_hash(tmp_path / "runs/whole")

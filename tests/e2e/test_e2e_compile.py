"""A run with torch.compile: the same bits whatever stops it, and what `auto` has chosen stays chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import headway, manifest, state_hash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"),
]


@pytest.mark.parametrize("extra", [[], ["train.activation_checkpointing=selective"], ["parallel.strategy=zero3"]])
def test_a_compiled_run_goes_on_to_the_same_bits(tiny: Callable[..., Path], tmp_path: Path, extra: list[str]) -> None:
    """Evaluation has batches of another size, which the run that goes on meets at another time."""
    config = tiny(
        train={"compile": True, "steps": 8}, checkpoint={"every": "2 steps"}, evaluation={"every": "3 steps", "rows": 8}
    )
    workers = ["-w", "2"] if extra and "zero3" in extra[0] else []
    whole = headway("train", config, "name=whole", *extra, *workers)
    assert whole.returncode == 0, whole.stderr
    killed = headway("train", config, "name=killed", "supervise.max_failures=0", *extra, *workers, faults="kill@step=5")
    assert killed.returncode != 0
    assert headway("train", config, "name=killed", "supervise.max_failures=0", *extra, *workers).returncode == 0
    assert state_hash(tmp_path / "runs/whole") == state_hash(tmp_path / "runs/killed")


@pytest.mark.parametrize("extra", [[], ["parallel.strategy=zero3", "-w", "2"]])
def test_it_learns_what_a_run_does_that_is_not_compiled(
    tiny: Callable[..., Path], tmp_path: Path, extra: list[str]
) -> None:
    config = tiny(model={"dropout": 0.0}, train={"steps": 8})  # compiled code draws other numbers
    for name, compiled in (("compiled", "true"), ("eager", "false")):
        done = headway("train", config, f"name={name}", f"train.compile={compiled}", *extra)
        assert done.returncode == 0, done.stderr
    ours, theirs = (last_loss(tmp_path / "runs" / name) for name in ("compiled", "eager"))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_an_elastic_run_is_the_same_on_any_number_of_workers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(
        train={"compile": True, "steps": 8, "lanes": 2}, determinism="elastic", checkpoint={"every": "2 steps"}
    )
    for workers in ("1", "2"):
        done = headway("train", config, f"name=on-{workers}", "-w", workers)
        assert done.returncode == 0, done.stderr
    changing = ("train", config, "name=changing", "supervise.max_failures=0")
    assert headway(*changing, "-w", "2", faults="kill@step=5%1").returncode != 0
    assert headway(*changing, "-w", "1").returncode == 0
    assert len({state_hash(tmp_path / "runs" / name) for name in ("on-1", "on-2", "changing")}) == 1


def test_what_auto_has_chosen_is_kept(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"compile": "auto", "steps": 6}, checkpoint={"every": "2 steps"})
    short = headway("train", config, "name=run", "supervise.max_failures=0", faults="kill@step=5")
    assert short.returncode != 0 and "not compiled: the layers take" in short.stderr
    assert manifest(tmp_path / "runs/run")["context"]["compiled"] is False
    again = headway("train", config, "name=run")
    assert again.returncode == 0 and "compiled" not in again.stderr, again.stderr


def last_loss(run: Path) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line][-1]

"""The command line on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.telemetry.metrics import read_metrics
from support.gpu import NEEDS_GPU, NEEDS_REAL_GPU
from support.runs import headway, state_hash

pytestmark = NEEDS_GPU


def on_gpu(tiny: Callable[..., Path], **sections: Any) -> Path:
    return tiny(**{**sections, "train": {"device": "cuda", **sections.get("train", {})}})


def losses(run: Path) -> list[float]:
    return [float(loss) for loss in read_metrics(run).series("train/loss")[1]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train": {"precision": "bf16", "micro_batch": "auto"}, "checkpoint": {"every": "1 steps"}},
        {"optimizer": {"name": "muon", "offload": True}},
        {"train": {"precision": "bf16", "weights": "bf16"}},
    ],
    ids=str,
)
def test_killed_and_resumed_it_has_the_same_state(
    tiny: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = on_gpu(tiny, **settings)
    done = headway("train", config, "name=whole")
    assert done.returncode == 0 and "1 worker on cuda" in done.stderr, done.stderr
    killed = headway("train", config, "name=killed", faults="kill@gradient=6")
    assert "died (signal 9)" in killed.stderr, killed.stderr
    resumed = headway("train", config, "name=killed")
    assert resumed.returncode == 0 and "resuming from" in resumed.stderr, resumed.stderr
    assert state_hash(tmp_path / "runs/killed") == state_hash(tmp_path / "runs/whole")
    found = losses(tmp_path / "runs/whole")
    assert len(found) == 10 and found[-1] < 0.9 * found[0]
    copied = read_metrics(tmp_path / "runs/whole").series("host_to_device/copied_gib")
    # At the interval of `telemetry.log_every`: inputs and targets of 8 rows of 32 tokens, 8 bytes each.
    assert [one.tolist() for one in copied] == [[10], [2 * 8 * 32 * 8 / 2**30]]


def test_a_supervised_run_begins_again_by_itself(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = on_gpu(tiny, supervise={"max_failures": 1})
    done = headway("train", config, faults="kill@step=5")
    assert done.returncode == 0 and "attempt 1 ended" in done.stderr, done.stderr
    assert state_hash(tmp_path / "runs/tiny", 10)


def test_a_checkpoint_of_a_gpu_is_one_for_a_cpu(tiny: Callable[..., Path], tmp_path: Path) -> None:
    trained = headway("train", on_gpu(tiny, train={"steps": 4}))
    assert trained.returncode == 0, trained.stderr
    resumed = headway("train", tiny(train={"steps": 10}), "--accept-changes")
    assert resumed.returncode == 0 and "1 worker on cpu" in resumed.stderr, resumed.stderr
    found = losses(tmp_path / "runs/tiny")
    assert len(found) == 10 and found[-1] < 0.9 * found[0]


def test_what_is_made_of_a_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config, run = on_gpu(tiny), tmp_path / "runs/tiny"
    for command in (
        ("train", config),
        ("eval", run),
        ("generate", run, "--prompt", "7: red", "--max-new-tokens", "4"),
        ("export", run, tmp_path / "exported"),
    ):
        done = headway(*command)
        assert done.returncode == 0, (command, done.stderr)


@NEEDS_REAL_GPU  # whose events PyTorch's profiler records itself
def test_a_profile_tells_the_device_s_time(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = on_gpu(tiny, train={"steps": 20})
    done = headway("profile", config, "--steps", "2", "--warmup", "1", "--output", tmp_path / "profile", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"][0]["device"] == "cuda"


def test_the_doctor_looks_at_it() -> None:
    done = headway("doctor", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr

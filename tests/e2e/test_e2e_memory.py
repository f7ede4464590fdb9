"""Runs that save memory in every way at once keep the promise that all runs make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from support import headway, manifest

SAVINGS = (
    "train.precision=fp16",
    "train.micro_batch=auto",
    "train.trial_step=true",
    "train.activation_checkpointing=selective",
    "optimizer.name=lion",
    "optimizer.learning_rate=1e-3",
    "schedule.name=rsqrt",
)


def test_a_run_that_is_killed_goes_on_bit_for_bit(tiny: Callable[..., Path]) -> None:
    result = headway("verify", tiny(), *SAVINGS, "--steps", "4", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"]


def test_what_was_chosen_is_said_and_kept(tiny: Callable[..., Path], tmp_path: Path) -> None:
    first = headway("train", tiny(), *SAVINGS, faults="kill@step=5")
    assert first.returncode != 0 and "micro-batches of 8 rows, the most that fits; 1 per lane and step" in first.stderr
    second = headway("train", tiny(), *SAVINGS)
    assert second.returncode == 0, second.stderr
    assert "micro-batches of 8 rows, as before" in second.stderr
    saved = manifest(tmp_path / "runs" / "tiny")
    assert saved["context"]["micro_batch"] == 8
    assert saved["cursor"]["loss_scale"] >= 1 and saved["cursor"]["step"] == 10
    records = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/loss" in record]
    assert all(record["train/loss_scale"] >= 1 for record in steps)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]


def test_what_this_machine_lacks_is_refused_before_the_first_step(tiny: Callable[..., Path]) -> None:
    for precision, nearest in (("tf32", "fp32"), ("fp8", "bf16")):
        result = headway("train", tiny(), f"train.precision={precision}")
        assert result.returncode == 2, result.stderr
        assert "compute capability" in result.stderr and f"train.precision={nearest}" in result.stderr
        assert "Traceback" not in result.stderr
    result = headway("train", tiny(), "optimizer.offload=true")
    assert result.returncode == 2 and "in host memory already" in result.stderr

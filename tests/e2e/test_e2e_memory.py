"""Runs that save memory in every way at once keep the promise that all runs make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway import load_config, train
from headway.core.errors import ConfigError
from support.runs import headway, manifest

SAVINGS = (
    "train.precision=fp16",
    "train.micro_batch=auto",
    "train.trial_step=true",
    "train.activation_checkpointing=selective",
    "optimizer.name=lion",
    "optimizer.learning_rate=1e-3",
    "schedule.name=rsqrt",
)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_bit_for_bit(tiny: Callable[..., Path]) -> None:
    result = headway("verify", tiny(), *SAVINGS, "--steps", "4", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["passed"]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("option", "reason"),
    [("train.precision=tf32", "compute capability 8.0"), ("optimizer.offload=true", "in host memory already")],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_this_machine_lacks_is_refused_before_there_is_a_run(
    tiny: Callable[..., Path], tmp_path: Path, option: str, reason: str, workers: str
) -> None:
    """Otherwise following the advice would be a change of the run's config."""
    with pytest.raises(ConfigError, match=reason):
        train(load_config(tiny(), [option, f"parallel.workers={workers}"]))
    assert not (tmp_path / "runs").exists()

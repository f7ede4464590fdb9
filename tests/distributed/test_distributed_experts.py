"""Experts on several workers learn what they do on one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support_trials import Trials, close

EXPERTS = {
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "dense_layers": 1,
    "expert_ffn_dim": 21,
    "router_score": "sigmoid",
    "balance_bias_rate": 0.01,
    "balance_loss": 0.1,
    "dropout": 0.0,
    "init_std": 0.06,  # scores that differ: two that are equal but for rounding may send a token here or there
}
#: Rows with unequally many targets, and clipping in every step.
HARD: dict[str, Any] = {
    "data": {"packing": "pad"},
    "model": EXPERTS,
    "train": {"steps": 12, "micro_batch": 1, "lanes": 4, "max_grad_norm": 0.3},
}
METRICS = (
    "train/loss",
    "train/items",
    "evaluation/loss",
    "train/router_z_loss",
    "train/router_balance_loss",
    "train/expert_load_max",
    "train/dropped_share",
)


def expert(degree: int, strategy: str = "auto") -> tuple[str, str]:
    return f"parallel.expert={degree}", f"parallel.strategy={strategy}"


def assert_like_single(runs: Trials, names: list[str]) -> None:
    norms = runs.metric("single", "train/grad_norm")
    assert min(norms) > 0.3
    for name in names:
        assert runs.metric(name, "train/grad_norm") == pytest.approx(norms, rel=1e-4), name
        for metric in METRICS:
            found, expected = runs.metric(name, metric), runs.metric("single", metric)
            assert expected and close(found, expected), (name, metric, found, expected)


def experts_worker(which: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = str(Path(__file__).with_name("experts_worker.py"))
    result = subprocess.run(
        [sys.executable, *command, script, which], capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_parts_gradients_norms_and_counts_are_those_of_the_whole() -> None:
    experts_worker("data")


def test_experts_on_two_workers_and_their_way_back(trials: Callable[..., Trials]) -> None:
    """Saved while they are dealt out, and taken up where they are not; and the other way round."""
    runs = trials(**HARD)
    runs.add("single", 1)
    names = [runs.add(s, 2, *expert(2, s)) for s in ("ddp", "zero3")]
    runs.run()
    assert len(set(runs.metric("single", "train/items"))) > 1
    names += [runs.add("alone", 1, copy_of="ddp"), runs.add("dealt-out", 2, *expert(2, "zero1"), copy_of="single")]
    runs.run()
    assert_like_single(runs, names)

"""Planned memory against what two real workers take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.waits import LONG

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan" / "memory.py"
needs_benchmarks = pytest.mark.skipif(not BENCHMARK.exists(), reason="the benchmarks are not part of this copy")


def measured(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """By strategy; fails where a plan is off by more than 5 %."""
    result = subprocess.run(
        [sys.executable, str(BENCHMARK), "--models", "tiny", "--precisions", "fp32", "--checkpointing", "full",
         "--micro-batches", "2", "--tolerance", "0.05", "--output", str(folder / "found.json"), *arguments],
        capture_output=True, text=True, timeout=LONG, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    return {line["strategy"]: line for line in json.loads((folder / "found.json").read_text())["results"]}


@pytest.mark.slow
@needs_benchmarks
def test_every_strategy_takes_what_is_planned(tmp_path: Path) -> None:
    strategies = ("ddp", "zero1", "zero2", "zero3", "zero3-each", "elastic", "elastic-zero3")
    found = measured(tmp_path, "--strategies", *strategies)
    assert set(strategies) == found.keys()
    # Not by chance: they differ from each other by more than the plan may be off.
    assert found["elastic"]["measured_bytes"] > 1.1 * found["ddp"]["measured_bytes"]
    assert found["ddp"]["measured_bytes"] > 1.1 * found["zero1"]["measured_bytes"]
    assert found["zero3"]["measured_bytes"] > 1.05 * found["zero3-each"]["measured_bytes"]


@pytest.mark.slow
@needs_benchmarks
def test_strategies_of_deepspeed_take_what_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    strategies = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero1-offload")
    found = measured(tmp_path, "--bucket", "200000", "--strategies", *strategies)
    assert set(strategies) == found.keys()
    # What goes to host memory is there on the CPU too, and more of it.
    assert found[strategies[3]]["measured_bytes"] > 1.1 * found[strategies[0]]["measured_bytes"]


@pytest.mark.slow
@needs_benchmarks
def test_frozen_weights_under_deepspeed_take_what_is_planned(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    pytest.importorskip("peft")
    strategies = ("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
    found = measured(tmp_path, "--bucket", "200000", "--models", "adapter", "--strategies", *strategies)
    assert set(strategies) == found.keys()
    # Stage 3 divides frozen weights too, and they are most of the model.
    assert found[strategies[2]]["measured_bytes"] < 0.95 * found[strategies[1]]["measured_bytes"]

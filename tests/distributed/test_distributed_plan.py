"""Planned memory against what two real workers take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan" / "memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not BENCHMARK.exists(), reason="the benchmarks are not part of this copy")
def test_every_strategy_takes_what_is_planned(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(BENCHMARK), "--models", "tiny", "--precisions", "fp32", "--checkpointing", "full",
         "--micro-batches", "2", "--tolerance", "0.05", "--strategies", "ddp", "zero1", "zero2", "zero3", "elastic",
         "--output", str(tmp_path / "found.json")],
        capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    found = {line["strategy"]: line for line in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert {"ddp", "zero1", "zero2", "zero3", "elastic"} == found.keys()
    # Not by chance: they differ from each other by more than the plan may be off.
    assert found["elastic"]["measured_bytes"] > 1.1 * found["ddp"]["measured_bytes"]
    assert found["ddp"]["measured_bytes"] > 1.1 * found["zero1"]["measured_bytes"]

"""The plan against figures that others have published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.waits import LONG

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "plan" / "published.py"


@pytest.mark.skipif(not BENCHMARK.exists(), reason="the benchmarks are not part of this copy")
def test_published_speeds_are_near_what_is_planned() -> None:
    """The benchmark fails when a case is off by more than 0.6 to 1.6, or the median by more than a tenth."""
    result = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=LONG, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "held out, speed ratio: 50 cases" in result.stdout
    assert "held out, memory ratio: 15 cases" in result.stdout

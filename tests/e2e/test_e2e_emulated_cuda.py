"""What is for GPUs, run on a machine without one: a CUDA device in host memory (`tests/cuda_in_memory`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cuda_in_memory.emulated_cuda import environment

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("folder", "least"), [pytest.param("e2e", 7, marks=pytest.mark.slow), ("unit", 23)])
def test_what_needs_a_gpu_does_what_it_should_on_an_emulated_one(folder: str, least: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which these tests run by themselves")
    variables = environment()
    if variables is None:
        pytest.skip("there is no compiler")
    files = [
        file for file in sorted((TESTS / folder).rglob("test_*.py")) if "from support.gpu import" in file.read_text()
    ]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
    result = subprocess.run(
        [*command, *map(str, files)], env=variables, cwd=TESTS.parent, capture_output=True, text=True, timeout=1700
    )
    assert result.returncode == 0, result.stdout[-9000:] + result.stderr[-3000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= least, result.stdout
    assert "there is no GPU\n" not in result.stdout

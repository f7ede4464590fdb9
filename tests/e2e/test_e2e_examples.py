"""The examples do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [[], pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_image_classifier_learns(tmp_path: Path, launcher: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / "image_classifier.py"), f"runs={tmp_path}", "train.device=cpu"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    loss = float(result.stdout.strip().splitlines()[-1].rsplit(" ", 1)[-1])
    assert loss < 0.5, "four classes: chance is a loss of 1.39"

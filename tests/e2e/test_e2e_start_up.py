"""What a start does not wait for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_loads_neither_the_compiler_nor_distributed_tensors_unless_it_needs_them(
    tiny: Callable[..., Path], optimizer: str
) -> None:
    """They take as long to load as PyTorch itself."""
    config = tiny(train={"steps": 2}, evaluation={"every": "1 steps"}, optimizer={"name": optimizer})
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", str(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"torch", "torch.optim"} <= loaded, "the worker's imports are seen"
    assert not loaded & {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}

"""What a start does not wait for."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import headway


@pytest.fixture(autouse=True)
def imports_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")


def loaded_by(*command: str | Path) -> list[str]:
    """All that a command and its processes load, once for each that does."""
    done = headway(*command)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_loads_neither_the_compiler_nor_distributed_tensors_unless_it_needs_them(
    tiny: Callable[..., Path], optimizer: str
) -> None:
    """They take as long to load as PyTorch itself."""
    config = tiny(train={"steps": 2}, evaluation={"every": "1 steps"}, optimizer={"name": optimizer})
    loaded = set(loaded_by("train", config))
    assert {"torch", "torch.optim"} <= loaded, "the worker's imports are seen"
    assert not loaded & {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can tell whether a process may be copied")
def test_several_workers_load_pytorch_once(tiny: Callable[..., Path]) -> None:
    """Also where somebody listens for notices, which takes threads."""
    notices = {"watch": ["gcp"], "endpoints": {"gcp": "http://127.0.0.1:9"}}
    loaded = loaded_by("train", tiny(train={"steps": 2}, preemption=notices), "--workers", "2")
    assert loaded.count("torch") == 1

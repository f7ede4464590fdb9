"""Runs whose weights are in bf16: without masters they resume to equal bits; exports of either kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import headway as headway_package
from headway.checkpoint.store import CheckpointStore
from headway.config import load_config
from headway.models.huggingface.checkpoint import import_model
from headway.parallel.host_weights import memory
from headway.training.evaluation.inference import export_trained, load_trained
from support.runs import headway, state_hash


def train(tiny: Callable[..., Path], name: str, weights: str, faults: str = "", **parallel: Any) -> Path:
    train = {"weights": weights, "precision": "bf16"}
    config = tiny(name=name, train=train, parallel={"threads": 1, **parallel}, determinism="run")
    result = headway("train", config, faults=faults, strategies=True)
    assert (result.returncode == 0) != bool(faults), result.stderr
    return config.parent / "runs" / name


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (1, "single"),
        pytest.param(2, "zero2", marks=pytest.mark.slow),
        pytest.param(2, "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_without_masters_has_the_same_bits(workers: int, strategy: str, tiny: Callable[..., Path]) -> None:
    parallel = {"workers": workers, "strategy": strategy}
    straight = train(tiny, "straight", "bf16_stochastic", **parallel)
    killed = train(tiny, "killed", "bf16_stochastic", faults="kill@step=7", **parallel)
    train(tiny, "killed", "bf16_stochastic", **parallel)
    assert state_hash(killed) == state_hash(straight)
    store = CheckpointStore(straight / "checkpoints")
    saved = store.load(store.info(10))
    assert {t.dtype for name, t in saved.items() if not name.startswith("optimizer.step.")} == {torch.bfloat16}


@pytest.mark.slow
def test_runs_continue_with_and_without_masters(tiny: Callable[..., Path]) -> None:
    """Begun in fp32, then with moments in bf16, then without masters, and back."""
    changes = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16_stochastic", "fp32"), ("fp32", "fp32")]
    kept = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
    for number, ((weights, moments), types) in enumerate(zip(changes, kept, strict=True), start=1):
        config = tiny(name="changed", train={"weights": weights, "precision": "bf16", "steps": 2 * number})
        result = headway("train", config, f"optimizer.moments={moments}", "--accept-changes")
        assert result.returncode == 0, result.stderr
        store = CheckpointStore(config.parent / "runs" / "changed" / "checkpoints")
        saved = store.load(store.info(2 * number))
        name = "layers.0.attention.qkv.weight"
        found = [str(saved[f"{kind}.{name}"].dtype) for kind in ("model", "optimizer.exp_avg")]
        assert found == [f"torch.{dtype}" for dtype in types]


def test_where_memory_is_short_files_hold_masters(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also after a save has moved them to the file that it is written from."""
    made: dict[str, Path] = {}
    for name, memory_bytes in (("memory", 2**34), ("files", 300_000)):  # the sums of 30k parameters fit, not the rest
        monkeypatch.setattr(
            memory, "found_room", lambda *_, memory_bytes=memory_bytes: memory.HostRoom(memory_bytes, 2**34)
        )
        path = tiny(name=name, train={"weights": "bf16", "precision": "bf16", "steps": 6}, evaluation={"every": None})
        made[name] = headway_package.train(load_config(path)).directory
        assert ("since memory is short" in capfd.readouterr().err) == (name == "files")
    assert state_hash(made["files"]) == state_hash(made["memory"])
    names = [{path.name for path in made[name].iterdir()} for name in ("files", "memory")]
    assert names[0] == names[1], "files without names"


SLOW = [("bf16", "fp32"), ("bf16_stochastic", "fp32"), ("bf16_stochastic", "bf16")]


@pytest.mark.parametrize(
    ("weights", "dtype"), [("bf16", "bf16"), *[pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW]]
)
def test_an_export_is_what_the_checkpoint_holds(
    weights: str, dtype: Literal["fp32", "bf16"], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = train(tiny, "exported", weights)
    export_trained(load_trained(run), tmp_path / "folder", dtype)
    of = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert {tensor.dtype for tensor in load_file(tmp_path / "folder" / "model.safetensors").values()} == {of}
    store = CheckpointStore(run / "checkpoints")
    saved = store.load(store.info(10))
    written = import_model(tmp_path / "folder")[1]
    assert all(torch.equal(t, saved[f"model.{name}"].to(of).float()) for name, t in written.items())

"""The examples do what they say."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from headway.telemetry.record import open_run
from support import headway, state_hash, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_image_classifier_learns(tmp_path: Path, workers: int) -> None:
    overrides = (f"runs={tmp_path}", "train.device=cpu", "train.steps=80")
    result = torchrun(workers, EXAMPLES / "image_classifier.py", *overrides)
    loss = float(result.stdout.strip().splitlines()[-1].rsplit(" ", 1)[-1])
    assert loss < 0.5, "four classes: chance is a loss of 1.39"


@pytest.fixture
def overrides(corpus: Path, tmp_path: Path) -> list[str]:
    """Short runs on the tiny corpus."""
    store = f"data.store={tmp_path}/store"
    return [
        f"runs={tmp_path}/runs",
        store,
        f"data.sources=[{corpus}/corpus.jsonl]",
        "train.steps=4",
        "data.workers=1",
        "parallel.threads=1",
    ]


def test_custom_parts_train_from_config_and_from_python_alike(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = headway("train", "custom_parts.yaml", "name=config", *overrides, cwd=EXAMPLES)
    assert result.returncode == 0, result.stderr
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run = importlib.import_module("custom_parts").main(["name=python", *overrides])
    runs = [tmp_path / "runs" / name for name in ("config", "python")]
    assert state_hash(runs[0]) == state_hash(runs[1])
    plain = headway("train", "custom_parts.yaml", "name=plain", "loss=null", *overrides, cwd=EXAMPLES)
    assert plain.returncode == 0 and state_hash(tmp_path / "runs/plain") != state_hash(runs[0])
    for path in runs:
        confidence = open_run(path).metrics.series("mine/confidence")[1]
        losses = open_run(path).metrics.series("train/loss")[1]
        assert [math.exp(-loss) for loss in losses] == pytest.approx(list(confidence))
    assert run.validation_loss is not None and run.validation_loss < math.log(300)


def test_a_student_learns_from_its_teacher(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run = importlib.import_module("distillation").main(overrides)
    losses = run.metrics.series("train/loss")[1]
    assert len(losses) == 4 and losses[-1] < losses[0]

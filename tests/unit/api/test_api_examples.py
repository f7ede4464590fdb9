"""The examples of parts of one's own: what the config names and what Python gives train alike."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from headway.api import train
from headway.config import load_config
from headway.telemetry.record import open_run
from support.runs import state_hash

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def overrides(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Short runs on the tiny corpus, in the folder of the examples."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    short = ["train.steps=3", "train.device=cpu", "data.workers=1", "parallel.threads=1", "telemetry.report=false"]
    data = [f"data.store={tmp_path}/store", f"data.sources=[{corpus}/corpus.jsonl]"]
    return [f"runs={tmp_path}/runs", *data, *short]


def test_custom_parts_train_from_config_and_from_python_alike(overrides: list[str]) -> None:
    named = train(load_config("custom_parts.yaml", ["name=config", *overrides]))
    given = importlib.import_module("custom_parts").main(["name=python", *overrides])
    assert state_hash(named.directory) == state_hash(given.directory)
    for run in (named, given):
        metrics = open_run(run.directory).metrics
        confidence, losses = (metrics.series(name)[1] for name in ("mine/confidence", "train/loss"))
        assert [math.exp(-loss) for loss in losses] == pytest.approx(list(confidence)) and len(losses) == 3


def test_a_student_learns_from_its_teacher(overrides: list[str]) -> None:
    run = importlib.import_module("distillation").main(overrides)
    losses = run.metrics.series("train/loss")[1]
    assert len(losses) == 3 and losses[-1] < losses[0]

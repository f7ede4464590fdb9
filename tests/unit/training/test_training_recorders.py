"""What the first worker writes down, and says."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.checkpoint.save.fence import Fenced, OwnerUnknown
from headway.config import Config, TrainConfig
from headway.core.files import timeout_writer
from headway.telemetry.metrics import read_metrics
from headway.training.recording.recorders import Recorder


def said_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: list[dict[str, float]], **checkpoint: Any
) -> str:
    """What is said while steps with these metrics are recorded."""
    config = Config(train=TrainConfig(steps=9), checkpoint=checkpoint)
    feed = SimpleNamespace(metrics=lambda step: {"data/share/a": 1.0})
    task = SimpleNamespace(feed=feed, is_language_model=True, objective=SimpleNamespace(figures=None))
    job: Any = SimpleNamespace(config=config, total_steps=9, task=task)
    recorder = Recorder(tmp_path / "metrics.jsonl", 1)
    recorder.on_start(job)
    for step, metrics in enumerate(steps, start=1):
        recorder.on_step(job, step, metrics)
    recorder._log.close()
    return capsys.readouterr().err


def test_each_record_asks_whose_the_run_is_where_a_disk_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeout_writer, "_SECONDS", 60.0)
    asked_by: list[threading.Thread] = []

    def ask() -> None:
        asked_by.append(threading.current_thread())
        if len(asked_by) == 2:
            raise OwnerUnknown("the disk is away")
        if len(asked_by) == 3:
            raise Fenced("it is another one's")

    task = SimpleNamespace(is_language_model=True)
    job: Any = SimpleNamespace(config=Config(train=TrainConfig(steps=9)), total_steps=9, task=task)
    recorder = Recorder(tmp_path / "metrics.jsonl", 1, may_write=ask)
    recorder.on_start(job)
    recorder.on_hold(job, 1, 0.5)
    recorder.on_hold(job, 2, 0.5)
    with pytest.raises(Fenced):
        recorder.on_hold(job, 3, 0.5)
    recorder.on_end(job)
    assert threading.current_thread() not in asked_by
    assert read_metrics(tmp_path).series("checkpoint/hold_stall_seconds")[0].tolist() == [1, 2]


def test_a_metric_that_no_step_has_is_told_at_the_first_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"train/loss": 1.0, "train/grad_norm": 2.0}
    remote = {"url": f"file://{tmp_path}/remote", "keep_best": 1, "keep_metric": "accurcy", "keep_mode": "max"}
    said = said_of(
        tmp_path, capsys, [dict(step), dict(step)], keep_best=1, keep_metric="val_loss", every="1 steps", remote=remote
    )
    assert said.count("checkpoint.keep_best goes by val_loss, which step 1 does not have") == 1
    assert "did you mean evaluation/loss?" in said
    assert "checkpoint.remote.keep_best goes by accurcy" in said
    assert "; it has data/share/a, train/grad_norm, train/loss" in said
    left_out = {"train/left_out_steps": 1.0}
    said = said_of(tmp_path, capsys, [left_out, dict(step)], keep_best=1, keep_metric="val_loss")
    assert "which step 2 does not have" in said and "which step 1" not in said, "a step that is left out has no metrics"


def test_a_metric_that_steps_have_is_no_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = {"train/loss": 1.0, "accuracy": 0.5}
    for checkpoint in (
        {"keep_best": 1, "keep_metric": "accuracy", "keep_mode": "max"},
        {"keep_best": 1, "keep_metric": "data/share/a"},
        {"keep_best": 0, "keep_metric": "nothing"},
    ):
        assert "keep_best" not in said_of(tmp_path, capsys, [dict(step)], **checkpoint)

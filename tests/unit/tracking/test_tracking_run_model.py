"""The model of a finished run for trackers: sent once, by its card or whole, and refused where it cannot be."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headway.config.sections.track import ModelUpload
from headway.core.errors import ConfigError, HeadwayError
from headway.tracking import mlflow_sink
from headway.tracking.cursor import CursorFile
from headway.tracking.follower import Follower, Waiting
from headway.tracking.run_model import run_model
from headway.tracking.sink import RunModel
from headway.tracking.sinks import check_trackers, parse_trackers
from support.followers import MemorySink, append, steps, write_run


class TakesModels(MemorySink):
    """A tracker in memory that takes models, too."""

    def __init__(self, **upload: Any) -> None:
        super().__init__()
        self.upload = ModelUpload(log_model=True, **upload)
        self.models: list[RunModel] = []

    def send_model(self, model: RunModel) -> Mapping[str, Any]:
        self.models.append(model)
        return {"opened": len(self.opened)}


def follow(run: Path, sink: TakesModels, is_over: bool = True) -> None:
    cursor = CursorFile(run, "memory")
    waiting = Waiting(lambda: True, goes_on=lambda: not is_over, sleep=lambda seconds: None, patience_seconds=0.0)
    try:
        Follower(run, sink, "memory", cursor, report=lambda text: None, waiting=waiting).run()
    finally:
        cursor.close()


def test_a_finished_run_sends_its_model_once_for_each_step_and_wish(tmp_path: Path) -> None:
    run, sink = write_run(tmp_path, steps(1, 10)), TakesModels(only="card")
    follow(run, sink, is_over=False)
    assert not sink.models, "it may go on"
    follow(run, sink)
    follow(run, sink)
    (model,) = sink.models
    assert (model.step, model.folder) == (10, None) and model.card.startswith("---\n") and "# tiny" in model.card
    sink.upload = ModelUpload(log_model=True, only="card", register="other")
    follow(run, sink)
    append(run, steps(11, 12))
    follow(run, sink)
    assert [one.step for one in sink.models] == [10, 10, 12] and "# other" in sink.models[1].card


@pytest.mark.parametrize("outcome", ["worker 0 died", "stopped by SIGTERM", None])
def test_a_run_that_has_not_finished_sends_no_model(tmp_path: Path, outcome: str | None) -> None:
    sink = TakesModels(only="card")
    follow(write_run(tmp_path, steps(1, 10), outcomes=(outcome,)), sink)
    assert sink.statuses and not sink.models


def test_a_large_model_and_a_failed_export_are_reported_and_leave_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps(1, 10))
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "model": {"parameters": 2**30}}))
    scratch = tmp_path / "scratch"
    upload = ModelUpload(log_model=True, limit_gib=3.9)
    with (
        pytest.raises(HeadwayError, match=r"not logged: it has 4.0 GiB, and limit_gib is 3.9"),
        run_model(run, upload, scratch),
    ):
        pass
    scratch.mkdir()
    (scratch / "left").touch()  # of a follower that was killed
    with (
        pytest.raises(HeadwayError, match="its export failed: error: ") as raised,
        run_model(run, ModelUpload(log_model=True), scratch),
    ):
        pass
    assert f"headway track {run}" in str(raised.value.fix) and not scratch.exists()


def test_what_cannot_be_logged_or_registered_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("headway.tracking.sinks._check_installed", lambda *_: None)  # the trackers' own packages

    def check(item: dict[str, Any]) -> ConfigError:
        with pytest.raises(ConfigError) as raised:
            check_trackers(parse_trackers([json.dumps(item)]))
        return raised.value

    wanted = {"log_model": True, "register": "tiny"}
    assert "no MLflow server is named" in check({"mlflow": wanted}).what
    folder = check({"mlflow": {**wanted, "uri": "file:///models"}})
    assert "a model is registered at a server" in folder.what and "track.0.mlflow.register" in str(folder.where)
    assert "mode is offline" in check({"wandb": wanted}).what
    assert "not logged" in check({"wandb": {"register": "tiny"}}).what
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(mlflow_sink.importlib.util, "find_spec", lambda name: None if name == "transformers" else name)
    missing = check({"mlflow": {"uri": "http://127.0.0.1:1", "log_model": True}})
    assert "needs the package 'transformers'" in missing.what
    check_trackers(parse_trackers(['{mlflow: {uri: "http://127.0.0.1:1", log_model: true, only: card}}']))

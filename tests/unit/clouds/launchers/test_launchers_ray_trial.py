"""A trial of Ray Tune without Ray: what is reported of its run, and what its checkpoints hold."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.clouds.launchers.ray import trainable
from headway.clouds.launchers.ray_trial import RunTrial, TrialSettings
from headway.config import dump_config, load_config, load_resolved
from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.run.directory.ledger_proof import prove
from support.runs import state_hash

RATE = "optimizer.learning_rate"


@pytest.fixture
def trial(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., RunTrial]:
    """Makes the trial of a name, whose runs do twelve steps and evaluate every four."""
    config = tiny(train={"steps": 12}, evaluation={"every": "4 steps"}, checkpoint={"every": "4 steps", "keep": 9})
    settings = TrialSettings(dump_config(load_config(config)), str(tmp_path), "evaluation/loss")

    def make(name: str, **values: Any) -> RunTrial:
        (tmp_path / name).mkdir(exist_ok=True)
        return RunTrial(settings, {RATE: 1e-2, **values}, tmp_path / name, name)

    return make


def reports_of(trial: RunTrial) -> list[dict[str, Any]]:
    found = [trial.next_report()]
    while not found[-1].get("done"):
        found.append(trial.next_report())
    return found


@pytest.mark.slow
def test_each_evaluation_is_one_report_and_another_trial_begins_from_a_checkpoint(
    trial: Callable[..., RunTrial], tmp_path: Path
) -> None:
    first = trial("first")
    found = [first.next_report()]
    first.save(tmp_path / "checkpoint")
    found += reports_of(first)
    assert [report["step"] for report in found] == [4, 8, 12]
    assert [report.get("done", False) for report in found] == [False, False, True]
    assert all({"evaluation/loss", "train/loss"} <= report.keys() for report in found)
    first.load(tmp_path / "checkpoint")
    rest = reports_of(first)
    assert [report["step"] for report in rest] == [8, 12], "its own run is where it is, and was reported up to step 4"

    pointer = json.loads((tmp_path / "checkpoint/headway.json").read_text())
    assert pointer["run"] == "first" and pointer["step"] >= 4
    clone = trial("clone", **{RATE: 3e-3})
    clone.load(tmp_path / "checkpoint")
    cloned = reports_of(clone)
    assert cloned[-1]["step"] == 12 and all(report["step"] > 4 for report in cloned)
    proof = prove(clone.run)
    assert proof.problems == [] and [begun.run["name"] for begun in proof.beginnings] == ["first"]
    assert load_resolved(clone.run / "config.yaml").segments[-1].changes == [f"{RATE} was 0.01 and is now 0.003"]
    before = state_hash(clone.run)
    clone.load(tmp_path / "checkpoint")
    assert reports_of(clone)[-1]["done"] and state_hash(clone.run) == before, "it has begun from there already"
    assert [path.name for path in clone.run.parent.iterdir() if path.is_dir()] == ["clone"]


@pytest.mark.slow
def test_a_trial_that_is_stopped_goes_on_and_one_that_is_killed_raises(
    trial: Callable[..., RunTrial], tmp_path: Path
) -> None:
    first = trial("first")
    assert first.next_report()["step"] == 4
    first.stop()
    attempt = json.loads((first.run / "attempts/001/attempt.json").read_text())
    assert attempt["outcome"] in ("preempted", "finished")
    again = reports_of(first)
    assert [report["step"] for report in again] == [8, 12]
    other = trial("other", **{"train.steps": 2000})
    assert other.next_report()["step"] == 4
    os.kill(json.loads((other.run / "attempts/001/attempt.json").read_text())["pid"], signal.SIGKILL)
    with pytest.raises(HeadwayError, match="ended with exit code -9"):
        reports_of(other)
    other.stop()


def test_what_cannot_continue_is_the_error_of_the_trial(trial: Callable[..., RunTrial], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        trial("refused", **{RATE: -1})
    first = trial("first")
    reports_of(first)
    first.save(tmp_path / "checkpoint")
    wider = trial("wider", **{"model.dim": 64})
    wider.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        wider.next_report()
    with pytest.raises(CheckpointError, match="has no run"):
        wider.load(tmp_path)


def test_a_search_without_ray_or_a_store_is_refused(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny(data={"store": str(tmp_path / "none")}))
    monkeypatch.setitem(sys.modules, "ray", type(sys)("ray"))
    monkeypatch.setattr(sys.modules["ray"], "tune", object(), raising=False)
    with pytest.raises(ConfigError, match="is not prepared yet"):
        trainable(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"\[ray\]|ray"):
        trainable(config)

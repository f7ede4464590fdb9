"""Runs whose machine died: a tracker shows them as running until a sweep sends their end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.application import application
from headway.core.coordination.lease import OWNER_FILE, RECORD_BYTES
from headway.core.errors import CheckpointError, ConfigError
from headway.tracking.cursor import CursorFile, cursor_name, unfinished
from headway.tracking.follow import follow
from headway.tracking.follower import Waiting, is_live
from headway.tracking.sinks import parse_trackers, resolve
from headway.tracking.sweep import sweep
from support.followers import FakeMlflow, append, steps, write_run

TRACKER = {"mlflow": {"uri": "http://127.0.0.1:9"}}


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    found = FakeMlflow()
    found.install(monkeypatch)
    return found


def died_elsewhere(folder: Path, name: str = "tiny") -> Path:
    """A run of another machine that has no end, as MLflow has it while it runs; five steps have not arrived."""
    run = write_run(folder, steps(1, 5), outcomes=(None,), name=name, track=[TRACKER])
    attempt = run / "attempts" / "001" / "attempt.json"
    attempt.write_text(json.dumps({**json.loads(attempt.read_text()), "host": "gone", "pid": 7}))
    [config] = parse_trackers(["{mlflow: {uri: 'http://127.0.0.1:9'}}"])
    waiting = Waiting(lambda: True, goes_on=lambda: True, sleep=lambda seconds: None)
    follow(run, config, "track.0", report=print, waiting=waiting)
    append(run, steps(6, 10))
    return run


def silence(run: Path, seconds: float) -> None:
    for path in (run / "metrics.jsonl", *run.glob("attempts/*/*")):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_a_run_whose_machine_died_is_ended(
    tmp_path: Path, mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    run = died_elsewhere(tmp_path)
    assert mlflow.runs["run0"].info.status == "RUNNING"
    sweep([tmp_path], [])
    assert mlflow.runs["run0"].info.status == "RUNNING" and is_live(run), "it wrote a moment ago"
    silence(run, 3700)
    assert not is_live(run)
    sweep([tmp_path], [])
    found = mlflow.runs["run0"]
    assert found.info.status == "KILLED"
    assert found.end == 1000 * (1000 + 10 + 100), "the time of its last record"
    assert [metric.step for metric in found.logged if metric.key == "train/loss"] == list(range(1, 11))
    assert not unfinished(run) and "sent its end to mlflow" in capsys.readouterr().err
    requests = len(mlflow.requests)
    sweep([tmp_path], [])
    assert len(mlflow.requests) == requests and "no tracker shows" in capsys.readouterr().err


def test_a_supervised_run_is_dead_when_its_lease_has_run_out(tmp_path: Path, mlflow: FakeMlflow) -> None:
    run = died_elsewhere(tmp_path)
    owner = json.dumps({"attempt": 1, "token": "t", "host": "gone", "pid": 7, "since": 1000.0}).encode()
    for left, status in ((60, "RUNNING"), (-1, "KILLED")):
        lease = json.dumps({"attempt": 1, "until": time.time() + left}).encode()
        (run / OWNER_FILE).write_bytes(owner.ljust(RECORD_BYTES) + lease)
        sweep([tmp_path], [])
        assert mlflow.runs["run0"].info.status == status


def test_a_sweep_ends_the_runs_of_all_folders_but_those_of_another_follower(tmp_path: Path, mlflow: FakeMlflow) -> None:
    runs = [died_elsewhere(tmp_path / "a", "one"), died_elsewhere(tmp_path / "b", "two")]
    for run in runs:
        silence(run, 3700)
    [config] = parse_trackers(["{mlflow: {uri: 'http://127.0.0.1:9'}}"])
    target = resolve(config, "")
    held = CursorFile(runs[1], cursor_name(target.name, target.place))
    sweep([tmp_path / "a", runs[1]], [])
    assert not unfinished(runs[0]) and unfinished(runs[1])
    held.close()
    sweep([runs[1]], [])
    assert not unfinished(runs[1])


def test_a_tracker_that_only_the_command_knows(
    tmp_path: Path, mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    run = died_elsewhere(tmp_path)
    (run / "config.yaml").write_text("name: tiny\n")
    silence(run, 3700)
    sweep([tmp_path], [])
    assert "--to names the tracker" in capsys.readouterr().err and mlflow.runs["run0"].info.status == "RUNNING"
    sweep([tmp_path], ["{mlflow: {uri: 'http://127.0.0.1:9'}}"])
    assert mlflow.runs["run0"].info.status == "KILLED"


def test_what_a_sweep_is_asked_wrongly(tmp_path: Path) -> None:
    def run(*words: str) -> BaseException | None:
        return CliRunner().invoke(application([words[0]]), list(words)).exception

    assert isinstance(run("track", "--sweep", str(tmp_path / "none")), CheckpointError)
    assert isinstance(run("track", "--sweep", "--once"), ConfigError)
    assert isinstance(run("track"), ConfigError)
    assert isinstance(run("top", str(tmp_path), "--sweep"), ConfigError)

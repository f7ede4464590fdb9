"""Studies as a user makes them: infeasible trials, stores, budgets, stopping, and what shows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.core.process.waiting import wait_until
from headway.lab.tune.stop import stop_study
from headway.lab.tune.study import open_study
from headway.telemetry.record import Run
from support.runs import headway, skip_without, write_config, write_corpus
from support.tune import SPACE, outcome, steps_done, write_study
from support.waits import LONG

skip_without("optuna")


def test_a_study_of_text(tmp_path: Path) -> None:
    """One key changes the store, and one makes trials infeasible; what is not among the best keeps no checkpoint."""
    write_corpus(tmp_path)
    write_config(tmp_path, train={"steps": 4})
    space = {
        "space": {"data.tokenizer.vocab_size": [300, 310], "model.heads": [4, 5]},
        "sampler": "grid",
        "keep": 1,
    }
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    dry = headway("tune", "config.yaml", "space.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert dry.returncode == 0, dry.stderr
    first = json.loads(dry.stdout)
    assert first["trials"] == 4
    assert [one["problem"] is None for one in first["first"]] == [True, False, True]
    assert not (tmp_path / "studies").exists()
    done = headway("tune", "config.yaml", "space.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert [one["state"] for one in trials] == ["complete", "infeasible", "complete", "infeasible"]
    assert "not divisible by heads 5" in trials[1]["notes"]["reason"]
    folder = tmp_path / "studies" / "tiny"
    assert len(list((folder / "stores").glob("*/manifest.json"))) == 1, "the other trials have the config's own store"
    best = json.loads(headway("tune", "best", folder, "--json").stdout)[0]
    saved = [path.name for path in (folder / "runs").iterdir() if list(path.glob("checkpoints/step-*"))]
    assert saved == [Path(best["run"]).name]
    assert best["objectives"] == [min(one["objectives"][0] for one in trials if one["objectives"])]
    page = (folder / "report.html").read_text()
    assert "data.tokenizer.vocab_size" in page and "infeasible" in page
    shown = json.loads(headway("top", tmp_path / "studies", "--json", "--all").stdout)
    assert {one["run"] for one in shown} == {"tiny/0000", "tiny/0002"}
    assert headway("tune", "show", folder).stdout.count("infeasible") == 2


def _started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway", "tune", "toy.yaml", "space.yaml", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _stopped(folder: Path, space: dict[str, Any], by_command: bool) -> None:
    """Stop a study in the middle of its first trial, by a command or by a signal, and continue it."""
    write_study(folder, space, train={"steps": 100})
    study = folder / "studies" / "toy"
    process = _started(folder)
    wait_until(lambda: process.poll() is not None or steps_done(study) >= 3, LONG)
    if by_command:
        assert "was asked to stop" in stop_study(open_study(study))  # faster than the command is on a busy machine
    else:
        os.kill(process.pid, signal.SIGTERM)
    _, told = process.communicate(timeout=LONG)
    assert process.returncode == 75, told
    assert "run the same command again" in told
    assert Run(study / "runs" / "0000").state == "preempted"
    assert outcome(study)["trials"][0][1] == "running"


@pytest.mark.slow
@pytest.mark.parametrize("by_command", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_stopped_study_saves_its_trials(tmp_path: Path, by_command: bool) -> None:
    _stopped(tmp_path, {**SPACE, "stopping": "none", "trials": 1}, by_command)
    done = headway("tune", "toy.yaml", "space.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = tmp_path / "studies" / "toy"
    run = Run(study / "runs" / "0000")
    assert outcome(study)["trials"][0][1] == "complete"
    assert len(run.attempts) == 2
    assert run.metrics.repeated_steps == 0, "it was saved when it was stopped"


@pytest.mark.slow
def test_trials_that_a_killed_search_has_left_are_stopped_too(tmp_path: Path) -> None:
    write_study(tmp_path, {**SPACE, "stopping": "none", "trials": 1}, train={"steps": 400})
    study = tmp_path / "studies" / "toy"
    process = _started(tmp_path)
    wait_until(lambda: process.poll() is not None or steps_done(study) >= 3, LONG)
    process.kill()
    process.wait()
    run = study / "runs" / "0000"
    assert "1 trial asked to save and stop" in stop_study(open_study(study))
    wait_until(lambda: Run(run).outcome != "running", LONG)
    assert Run(run).state == "preempted"
    assert outcome(study)["trials"][0][1] == "running"


@pytest.mark.slow
def test_a_budget_holds_over_all_trials(tmp_path: Path) -> None:
    """A dollar a second: the second trial, or the third one, is saved before the budget is spent."""
    write_study(tmp_path, {**SPACE, "stopping": "none", "trials": 50}, train={"steps": 40})
    words = ["toy.yaml", "space.yaml", "cost.usd_per_hour=3600"]
    done = headway("tune", *words, "--budget", "40", cwd=tmp_path)
    assert done.returncode == 6, done.stderr
    assert "of the study's budget of $40.00" in done.stderr
    study = open_study(tmp_path / "studies" / "toy")
    spent = sum(Run(path).metrics.last("cost/spent_usd") or 0.0 for path in study.runs.glob("0*"))
    assert 10 < spent <= 40
    paused = [one for one in study.open_journal().records if not one.has_ended]
    assert len(paused) <= 1


@pytest.mark.slow
def test_five_failures_in_a_row_end_a_study(tmp_path: Path) -> None:
    write_study(tmp_path, {**SPACE, "stopping": "none", "trials": 50})
    task = tmp_path / "toy_task.py"
    broken = (
        "        if model.training and seen.append(1) is None and len(seen) > 4:\n            raise ArithmeticError\n"
    )
    text = task.read_text().replace("    def loss(", "    seen = []\n\n    def loss(")
    task.write_text(text.replace("        time.sleep", f"{broken}        time.sleep"))
    done = headway("tune", "toy.yaml", "space.yaml", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "5 trials in a row have failed" in done.stderr
    study = open_study(tmp_path / "studies" / "toy")
    assert [one.state for one in study.open_journal().records] == ["failed"] * 5


def test_a_space_of_infeasible_trials_alone_ends(tmp_path: Path) -> None:
    write_study(tmp_path, {"space": {"train.micro_batch": {"int": [3, 3000], "step": 7}}, "trials": 50})
    done = headway("tune", "toy.yaml", "space.yaml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "the first 10 trials are infeasible" in done.stderr

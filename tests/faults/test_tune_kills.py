"""Studies that are killed: the search, its trials, or both at once; what comes out is that of the undisturbed study."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.core.process.waiting import wait_until
from headway.run.directory.ledger_proof import prove
from headway.telemetry.metrics import read_metrics
from support.runs import skip_without
from support.tune import SPACE, attempts, outcome, steps_done, write_study
from support.waits import LONG

skip_without("optuna")

TARGETS = ("tune", "trials", "both")


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the search as a user does; its trials are processes below it."""
    command = [sys.executable, "-m", "headway", "tune", "toy.yaml", "space.yaml", *words]
    with (folder / "tune.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def kill(process: subprocess.Popen[bytes], target: str) -> None:
    """Kill the search, all processes of its trials, or both."""
    below = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    if target != "trials":
        os.kill(process.pid, signal.SIGKILL)
    for one in below if target != "tune" else ():
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if target != "trials":
        process.wait()


def disturbed(folder: Path, kills: int, seed: int, *words: str) -> int:
    """Work on a study until it ends, with kills at random steps, and return how many there were."""
    generator, study, done = random.Random(seed), folder / "studies" / "toy", 0
    process = start(folder, *words)
    try:
        while True:
            if process.poll() is not None:
                if process.returncode == 0:
                    return done
                assert process.returncode == -signal.SIGKILL, (folder / "tune.log").read_text()[-3000:]
                process = start(folder, *words)
            if done == kills:
                process.wait(LONG)
                continue
            wanted = steps_done(study) + generator.randint(1, 12)
            wait_until(lambda: process.poll() is not None or steps_done(study) >= wanted, LONG, 0.01)  # noqa: B023
            if process.poll() is None:
                kill(process, TARGETS[(done + seed) % len(TARGETS)])
                done += 1
    finally:
        if process.poll() is None:
            kill(process, "both")


def check_runs(study: Path) -> None:
    """Check that each trial has one run, which trained each row once, and nothing after its end."""
    states = {trial[0]: trial[1] for trial in outcome(study)["trials"]}
    folders = sorted(path.name for path in (study / "runs").iterdir() if path.is_dir())
    assert folders == [f"{number:04d}" for number in states]
    for number, state in states.items():
        run = study / "runs" / f"{number:04d}"
        ended = [one for one in attempts(run) if one.get("outcome") == "finished"]
        trained = [one for one in ended if one["number"] in read_metrics(run).spans] if ended else []
        assert len(trained) <= 1, f"trial {number} was trained twice"
        if state == "complete":  # of those that were given up, no checkpoint is left to prove
            assert not prove(run).problems, prove(run).problems


def check(tmp_path: Path, kills: int, space: dict[str, Any], seed: int = 0) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_study(folder, space)
    assert start(whole).wait(LONG) == 0, (whole / "tune.log").read_text()[-3000:]
    assert disturbed(killed, kills, seed) == kills, "the study ended before all kills"
    expected = outcome(whole / "studies" / "toy")
    assert {trial[1] for trial in expected["trials"]} == {"complete", "pruned"}
    assert outcome(killed / "studies" / "toy") == expected
    check_runs(killed / "studies" / "toy")
    before = _attempts(killed)
    assert start(killed).wait(LONG) == 0
    assert _attempts(killed) == before, "the same command after the end has trained"


def _attempts(folder: Path) -> int:
    return len(list(folder.glob("studies/toy/runs/*/attempts/*")))


def test_two_kills_change_nothing(tmp_path: Path) -> None:
    check(tmp_path, 2, {**SPACE, "trials": 3}, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ten_kills_change_nothing(tmp_path: Path, seed: int) -> None:
    check(tmp_path, 10, {**SPACE, "trials": 10}, seed=seed)


@pytest.mark.slow
def test_several_at_a_time_lose_no_trial_and_double_none(tmp_path: Path) -> None:
    write_study(tmp_path, {**SPACE, "trials": 8})
    assert disturbed(tmp_path, 6, 4, "--at-a-time", "2") == 6
    study = tmp_path / "studies" / "toy"
    found = outcome(study)["trials"]
    assert [trial[0] for trial in found] == list(range(8))
    assert {trial[1] for trial in found} <= {"complete", "pruned"}
    check_runs(study)


@pytest.mark.slow
def test_a_population_that_is_killed_becomes_the_undisturbed_one(tmp_path: Path) -> None:
    """Also with two at a time, since a generation waits for the one before."""
    stopping = {"name": "pbt", "population": 3, "every_steps": 4, "quantile": 0.34}
    ranges = {"optimizer.learning_rate": {"log": [1e-5, 1e-1]}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_study(folder, {"space": ranges, "sampler": "random", "stopping": stopping, "keep": 100})
    assert start(whole).wait(LONG) == 0, (whole / "tune.log").read_text()[-3000:]
    assert disturbed(killed, 4, 1, "--at-a-time", "2") == 4
    expected = outcome(whole / "studies" / "toy")
    assert outcome(killed / "studies" / "toy") == expected
    assert [trial[1] for trial in expected["trials"]] == ["complete"] * 9
    proofs = [prove(killed / "studies" / "toy" / "runs" / f"{number:04d}") for number in (6, 7, 8)]
    assert [proof.problems for proof in proofs] == [[], [], []]
    assert [[begun.step for begun in proof.beginnings] for proof in proofs] == [[4, 8]] * 3

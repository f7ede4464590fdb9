"""Signals at the edges: to the launcher alone, and before the first step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.core.process.waiting import wait_until
from support.preloaded import Copy
from support.runs import headway, start_headway
from support.waits import LONG

#: The command line, with workers that take half a second to write down why they end, and the first one a whole one.
LINGERING = """
import time
from headway.run.supervisor import worker

def report(folder, record, report=worker._report):
    time.sleep(0.5 if record.rank else 1.0)
    report(folder, record)

worker._report = report
"""


#: The command line, with a process between supervisor and workers that kills those at once that it ends.
HASTY = """
from headway.run.supervisor import local_workers

local_workers._END_SECONDS = 0.0
"""


def ended(process: Copy | subprocess.Popen[str]) -> str:
    """What it has said, when it has ended; if it does not, it must not go on beside the other tests."""
    try:
        return process.communicate(timeout=LONG)[1]
    finally:
        process.kill()


def wait_for(path: Path) -> None:
    assert wait_until(lambda: path.exists() and path.stat().st_size, LONG, 0.005)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.slow), signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_its_workers(
    tiny: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    config = tiny(train={"steps": 100_000}, checkpoint={"every": "100000 steps"})
    process = start_headway("train", config, "-w", "2", strategies=True)
    wait_for(tmp_path / "runs/tiny/metrics.jsonl")
    process.send_signal(number)
    errors = ended(process)
    assert process.returncode == 75, errors
    assert f"stopped by {number.name}; step" in errors, errors
    assert list((tmp_path / "runs/tiny/checkpoints").glob("step-*"))


@pytest.mark.parametrize("again", [False, True])
def test_what_comes_after_a_save_takes_no_worker_before_it_has_told_why(
    tiny: Callable[..., Path], tmp_path: Path, again: bool
) -> None:
    """The first worker to leave has the agent end the others, and a signal may come twice. Without their reasons a
    state that is saved was told as lost, or the reason of another worker than the first."""
    config = tiny(train={"steps": 100_000}, checkpoint={"every": "100000 steps"})
    process = start_headway("train", config, "-w", "2", before=LINGERING, strategies=True)
    run = tmp_path / "runs/tiny"
    wait_for(run / "metrics.jsonl")
    process.send_signal(signal.SIGHUP)
    if again:
        assert wait_until(lambda: list((run / "checkpoints").glob("step-*")), LONG, 0.005)
        process.send_signal(signal.SIGHUP)
    errors = ended(process)
    assert process.returncode == 75, errors
    assert "stopped by SIGHUP; step" in errors and "is saved" in errors, errors
    reasons = sorted(path.name for path in (run / "attempts/001").glob("error-*.json"))
    assert reasons == ["error-0.json", "error-1.json"]


@pytest.mark.parametrize("whom", ["all", "agent"])
def test_workers_have_the_time_that_their_saves_take(tiny: Callable[..., Path], tmp_path: Path, whom: str) -> None:
    """systemd and Slurm send a signal to all processes of a job, the one between supervisor and workers among them,
    which would give workers half a minute; here, none at all."""
    config = tiny(train={"steps": 100_000}, checkpoint={"every": "100000 steps"})
    process = start_headway("train", config, "-w", "2", before=HASTY, strategies=True)
    wait_for(tmp_path / "runs/tiny/metrics.jsonl")
    [agent] = psutil.Process(process.pid).children()
    workers = agent.children()
    assert len(workers) == 2
    for told in (agent, *workers, process) if whom == "all" else (agent,):
        told.send_signal(signal.SIGTERM)
    errors = ended(process)
    assert process.returncode == 75, errors
    assert "is saved" in errors, errors
    assert list((tmp_path / "runs/tiny/checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_is_a_preemption_too(
    tiny: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    process = start_headway("train", tiny(train={"steps": 100_000}), fresh=True)  # its worker has yet to load PyTorch
    attempt = tmp_path / "runs/tiny/attempts/001/attempt.json"
    wait_for(attempt)
    process.send_signal(number)
    errors = ended(process)
    assert process.returncode == 75, errors
    assert json.loads(attempt.read_text())["exit_code"] == 75


def test_a_process_whose_starter_ignores_children_knows_of_its_own(tiny: Callable[..., Path]) -> None:
    """That is inherited: from a daemon written so, or by `trap '' CHLD`."""
    command = [sys.executable, "-m", "headway", "train", str(tiny())]
    done = subprocess.run(
        ["bash", "-c", """trap '' CHLD; exec "$@" """, "bash", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_wish_to_stop_does_not_wait_for_an_evaluation(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A machine that goes may go in the middle of it."""
    config = tiny(train={"steps": 100_000}, evaluation={"every": "1 steps"}, checkpoint={"every": "100000 steps"})
    done = headway("train", config, "supervise.enabled=false", faults="stop@step=3,kill@evaluation=4")
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "runs/tiny/checkpoints/step-00000004").exists()

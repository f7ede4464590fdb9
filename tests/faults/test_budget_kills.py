"""A run with a budget that is killed on the way: what it spends stays within it, and its state is that without one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.process.waiting import wait_until
from headway.run.directory.account import account_of, measured_saves, save_seconds
from headway.telemetry.record import Run
from support.runs import headway, state_hash
from support.waits import LONG

#: A dollar a second, so that a budget is spent within one.
PRICE = 3600.0


def _killed(command: list[str], run: Path, seconds: float) -> None:
    """Start a training, and kill all its processes a while after its first step; it may have ended before."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    began = lambda: metrics.exists() and metrics.stat().st_size > before  # noqa: E731
    wait_until(lambda: process.poll() is not None or began(), LONG, 0.01)
    time.sleep(seconds)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow  # seven trainings; units: tests/unit/run/session/test_session_budget.py, test_runs_account.py
def test_a_budget_holds_over_kills_and_raising_it_continues_the_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"steps": 60}, checkpoint={"every": "5 steps"}, evaluation={"every": None})
    assert headway("train", config, "name=whole").returncode == 0
    whole = account_of(Run(tmp_path / "runs" / "whole"), PRICE).total_usd  # what the run takes in seconds
    run, generator = tmp_path / "runs" / "killed", random.Random(5)
    budget = whole  # too little for a run that is killed and repeats its starts
    words = ["train", str(config), "name=killed", f"cost.usd_per_hour={PRICE}", f"budget.usd={budget}"]
    for _ in range(5):
        _killed([sys.executable, "-m", "headway", *words], run, generator.uniform(0.0, whole / 12))
    records = [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/attempt.json"))]
    assert len(records) >= 3, "kills came too late to test anything"

    def spent() -> float:
        return account_of(Run(run)).total_usd

    done = headway(*words)
    if done.returncode == 0:
        pytest.skip("the machine has become so much faster meanwhile that the budget sufficed")
    assert done.returncode == 6, done.stderr
    save = save_seconds(measured_saves(Run(run).metrics)) * PRICE / 3600
    assert spent() <= budget + save
    refused = headway(*words)
    assert refused.returncode == 6 and "budget.usd=" in refused.stderr.splitlines()[-1], refused.stderr
    assert spent() <= budget + save, "a refusal costs nothing"
    raised = headway(*words, f"budget.usd={budget + 100 * whole}")
    assert raised.returncode == 0, raised.stderr
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")

"""Kills at random moments, then resume: the state must equal the uninterrupted run's, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headway.core.coordination.heartbeat import Reading, read_heartbeat
from headway.core.process.waiting import wait_until
from support.runs import headway, state_hash
from support.waits import LONG

STEPS = 40


def _kill_group_after(config: Path, workers: int, seconds: float) -> bool:
    """Start a training and SIGKILL its whole process group after a while; whether it was still going on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "train", str(config), "name=killed", "--workers", str(workers)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = config.parent / "runs" / "killed" / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    # Once it makes steps the random moment counts.
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > before), LONG, 0.01)
    time.sleep(seconds)
    running = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return running


@pytest.mark.slow  # the campaign in test_chaos_campaign.py kills at random, too
@pytest.mark.parametrize("workers", [1, 2])
def test_two_kills_of_the_process_group_at_random_moments(
    tiny: Callable[..., Path], tmp_path: Path, workers: int
) -> None:
    # Slow enough for the kills to hit: a step takes about 10 ms.
    config = tiny(train={"steps": STEPS, "global_batch": 32}, checkpoint={"every": "7 steps"})
    assert headway("train", config, "name=whole", "--workers", str(workers)).returncode == 0
    generator = random.Random(workers)
    hit = [_kill_group_after(config, workers, generator.uniform(0.0, 0.15)) for _ in range(2)]
    assert any(hit), "no kill hit a running training, so nothing was tested"
    resumed = headway("train", config, "name=killed", "--workers", str(workers))
    assert resumed.returncode == 0, resumed.stderr
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "whole")


@pytest.mark.slow  # as above
def test_kills_at_every_phase_of_a_step(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"steps": 6})
    assert headway("train", config, "name=whole").returncode == 0
    phases = ("kill@gradient=1", "kill@step=3", "kill@checkpoint.stage:1")
    together = ("shard", "manifest", "rename")  # the process that writes takes training with it
    for phase in (*phases, *(f"kill-group@checkpoint.{point}:1" for point in together)):
        killed = headway("train", config, "name=killed", faults=phase)
        assert killed.returncode == 1 and "died (signal 9)" in killed.stderr, phase
    assert headway("train", config, "name=killed").returncode == 0
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "whole")


def processes_of(folder: Path, workers: list[Reading | None]) -> list[psutil.Process]:
    """Those that are left of a run: its workers, and all whose command line names the folder."""
    pids = {worker.pid for worker in workers if worker is not None}
    there = psutil.process_iter(["pid", "cmdline", "status"])
    return [
        process
        for process in there
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and (process.info["pid"] in pids or str(folder) in " ".join(process.info["cmdline"] or ()))
    ]


def test_the_death_of_the_launcher_leaves_no_orphans(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"steps": 100_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "train", str(config), "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    try:
        assert wait_until(lambda: metrics.exists() and metrics.stat().st_size, LONG)
        workers = [read_heartbeat(page) for page in (tmp_path / "runs/tiny/attempts/001").glob("heartbeat-*")]
        assert len(workers) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert wait_until(lambda: not processes_of(tmp_path, workers), LONG), processes_of(tmp_path, workers)
        size = metrics.stat().st_size
        time.sleep(1.0)
        assert metrics.stat().st_size == size, "a worker goes on training without its launcher"
    finally:
        subprocess.run(["pkill", "-KILL", "-f", str(tmp_path)], check=False)

"""Whom a supervisor blames among several workers, and what it tells of all of them; and whom it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.core.process.faults import FAULTS_VARIABLE
from headway.core.process.tree import ask_for_stacks
from headway.run.supervisor import watchdog, worker_control
from headway.run.supervisor.error_report import WorkerDied


@pytest.fixture
def train(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Trains under a supervisor in this process, which compares workers often and waits long for their stacks; returns
    the records of the attempts."""

    def patiently(files: Any, seconds: float, stopped: bool = False) -> None:
        ask_for_stacks(files, seconds and 60.0, stopped)

    monkeypatch.setattr(worker_control, "ask_for_stacks", patiently)
    monkeypatch.setattr(watchdog, "_WINDOW_SECONDS", 0.5)

    def make(workers: int, faults: str, **sections: Any) -> list[dict[str, Any]]:
        monkeypatch.setenv(FAULTS_VARIABLE, faults)
        quick = {"checkpoint": {"every": "1000 steps"}, "parallel": {"workers": workers, "threads": 1}}
        config = tiny(**quick, **sections)
        try:
            headway.train(headway.load_config(config))
        except WorkerDied as error:
            assert error.exit_code == 1
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/tiny/attempts/*/attempt.json"))]

    return make


@pytest.mark.slow
def test_one_of_four_workers_that_hangs_or_is_stopped_is_named(train: Callable[..., list[Any]], tmp_path: Path) -> None:
    supervise = {"hang_seconds": 20, "hang_steps": 2, "max_failures": 1}
    records = train(4, "hang@compute=2%2,freeze@compute=2#2%1", supervise=supervise)
    assert [(r["kind"], r["rank"], r["step"]) for r in records] == [("hung", 2, 2), ("hung", 1, 2)]
    assert "gave no sign of life" in records[0]["outcome"] and "SIGSTOP" in records[1]["outcome"]
    for record in records:
        to_blame, others = record["rank"], [rank for rank in range(4) if rank != record["rank"]]
        assert record["waiting_workers"] == others
        # It had finished an exchange, and the others have begun the one after it, in which they wait.
        exchanges = record["exchanges"]
        last = exchanges[str(to_blame)]["finished"]
        assert exchanges[str(to_blame)]["begun"] == last and last["number"] > 0
        waited = {"number": last["number"] + 1, "name": "sum of gradients"}
        assert [exchanges[str(rank)] for rank in others] == [{"begun": waited, "finished": last}] * 3
        assert f"; last exchange {last['number']} ({last['name']}), finished;" in record["outcome"]
        assert record["outcome"].endswith(f" waited for it in exchange {last['number'] + 1} (sum of gradients)")
        folder = tmp_path / f"runs/tiny/attempts/{record['number']:03}"
        stacks = [(folder / f"stack-{rank}.txt").read_text() for rank in range(4)]
        assert ["in fault_point" in stack for stack in stacks] == [rank == to_blame for rank in range(4)]
        assert all("in finish" in stacks[rank] for rank in others)


@pytest.mark.slow
def test_workers_that_are_all_slow_are_healthy_and_one_five_times_slower_is_named(
    train: Callable[..., list[Any]],
) -> None:
    """Own parts of a step take 0.1 s, as long as three windows; then those of one worker take 0.5 s. Whoever is named
    ends the attempt, so nobody was before."""
    sections = {"train": {"steps": 60, "global_batch": 6}, "supervise": {"slow_worker": "restart"}}
    (record,) = train(2, "slow@step=1,slow@compute=18%1", **sections)
    assert (record["kind"], record["rank"], record["waiting_workers"]) == ("slow", 1, [0])
    assert 18 < record["step"] < 60 and "warnings" not in record
    assert "mostly computing" in record["outcome"] and "; last exchange " in record["outcome"]

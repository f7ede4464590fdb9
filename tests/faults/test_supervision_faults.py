"""Workers that die, hang, crash and come back from the dead, under a supervisor that goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config, resolve
from headway.core.coordination.heartbeat import read_heartbeat
from headway.core.process.table import DEAD, process_state
from headway.core.process.waiting import wait_until
from headway.data.remote_store import open_store
from headway.models.build import complete
from headway.run.directory.ledger_proof import prove
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import write_config
from headway.telemetry.metrics import read_metrics
from support.runs import headway, start_headway, state_hash
from support.waits import LONG


def attempts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/attempt.json"))]


def last(record: dict[str, Any], rank: str) -> str:
    """The last exchange that a worker began, in words."""
    return "{number} ({name})".format(**record["exchanges"][rank]["begun"])


def alerts_of_ends(folder: Path) -> list[str]:
    """What was told of attempts that ended; a busy machine may be a reason for other alerts."""
    file = folder / "alerts.jsonl"
    told = [json.loads(line)["what"] for line in file.read_text().splitlines()] if file.exists() else []
    return [what for what in told if what.startswith("attempt ")]


def gone(pid: int) -> bool:
    return process_state(pid) is None or is_in_state(pid, DEAD)


def written(run: RunDirectory) -> tuple[bytes, list[str], list[str]]:
    """What only the owner of a run may add to."""
    commits = run.ledger_path.read_text().splitlines() if run.ledger_path.exists() else []
    return run.metrics_path.read_bytes(), commits, sorted(path.name for path in run.checkpoints.glob("step-*"))


def is_in_state(pid: int, wanted: str) -> bool:
    state = process_state(pid)
    return state is not None and state.state == wanted


def test_one_command_goes_on_after_a_kill_a_hang_and_a_crash(tiny: Callable[..., Path], tmp_path: Path) -> None:
    alert = {"alert": f"cat >> '{tmp_path}/alerts.jsonl'"}
    config = tiny(supervise={"max_failures": 3, "hang_seconds": 20}, telemetry=alert)
    assert headway("train", config, "name=whole").returncode == 0
    assert not alerts_of_ends(tmp_path), "all was well"
    faults = "kill@step=3,hang@step=5#2,crash@step=7#3,slow@step=8#4"
    result = headway("train", config, "name=hurt", faults=faults)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "hurt"
    records = attempts(run)
    told = [(r["number"], r["kind"], r.get("step"), r.get("signal"), r.get("error")) for r in records]
    assert told == [
        (1, "died", 3, 9, None),
        (2, "hung", 5, None, None),
        (3, "error", 7, None, "RuntimeError"),
        (4, "finished", None, None, None),
    ]
    assert all(f"attempt {number} ended: worker 0" in result.stderr for number in (1, 2, 3))
    alerts = alerts_of_ends(tmp_path)
    assert [f"attempt {number} ended: worker 0" in text for number, text in enumerate(alerts, 1)] == [True] * 3
    assert "failure 3 of 3" in records[2]["decision"] and records[3]["restarts"] == 3
    # A hang that holds the interpreter's lock is seen from outside, with the line that it is in.
    assert "in fault_point" in (run / "attempts/002/stack-0.txt").read_text()
    assert "fault_point" in records[1]["frames"][-1] and records[1]["silent_seconds"] >= 20
    assert "ordered by HEADWAY_FAULTS" in (run / "attempts/003/traceback.txt").read_text()
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")
    assert prove(run).problems == []
    # The last attempt tells what has become of the time before it, as far as step 6, with which it begins.
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    (past,) = [line for line in lines if line["kind"] == "goodput" and line["attempt"] == 4]
    assert past["lost_steps"] == {"1": 1, "2": 1, "3": 1} and past["lost_seconds"]["until a hang was noticed"] >= 20
    assert read_metrics(run).series("goodput/lost_steps")[1][-1] == 3
    shown = json.loads(headway("runs", "show", run, "--json").stdout)
    assert shown["goodput"]["lost_steps"] == {"1": 1, "2": 1, "3": 1} and "goodput" in result.stderr


def test_nobody_waits_for_the_part_of_a_dead_worker(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """It dies with the process that writes for it, in the very first checkpoint: there is no other to begin from, so
    what the others write would have all the time that it takes."""
    config = tiny(checkpoint={"every": "2 steps"}, supervise={"max_failures": 1})
    result = headway("train", config, "-w", "2", faults="kill-group@checkpoint.shard%1")
    assert result.returncode == 0, result.stderr
    lost, finished = attempts(tmp_path / "runs" / "tiny")
    assert (lost["kind"], lost["rank"], finished["kind"]) == ("died", 1, "finished")
    assert lost["exchanges"]["1"]["begun"]["number"] > 0 and f"; last exchange {last(lost, '1')}" in lost["outcome"]
    stack = tmp_path / "runs/tiny/attempts/001/stack-0.txt"
    assert 'File "' in stack.read_text(), "of the other one too"
    assert lost["ended"] - stack.stat().st_mtime < 45, "it is written when the death is noticed"
    assert "Terminating process" not in result.stderr, "what PyTorch's agent logs is told better"


@pytest.mark.slow
def test_a_worker_that_is_lost_twice_is_left_out_until_it_is_back(tiny: Callable[..., Path], tmp_path: Path) -> None:
    supervise = {"max_failures": 3, "hang_seconds": 20, "grow_after": "1 s"}
    config = tiny(supervise=supervise, determinism="elastic", train={"steps": 150}, checkpoint={"every": "1000 steps"})
    result = headway("train", config, "-w", "1:2", faults="freeze@step=5%1,kill@step=6#2%1")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / "tiny"
    frozen, killed, fewer, finished = attempts(run)
    assert (frozen["kind"], frozen["rank"], frozen["step"], frozen["waiting_workers"]) == ("hung", 1, 5, [0])
    assert (killed["kind"], killed["rank"], killed["signal"]) == ("died", 1, 9)
    assert killed["decision"] == "worker 1 is lost for good; the run continues with 1 worker"
    assert (fewer["workers"], fewer["outcome"], fewer["exit_code"]) == (1, "preempted", 75)
    assert (finished["workers"], finished["outcome"]) == (2, "finished")
    assert "2 workers again" in fewer["decision"]
    # Stacks of all are kept; only that of the one to blame is where the fault is.
    stacks = [(run / f"attempts/001/stack-{rank}.txt").read_text() for rank in (0, 1)]
    assert "fault_point" in stacks[1] and "fault_point" not in stacks[0] and "parallel/tree.py" in stacks[0]
    assert headway("train", config, "name=alone").returncode == 0
    assert state_hash(run) == state_hash(tmp_path / "runs" / "alone")
    assert prove(run).problems == []


def test_the_same_fault_twice_is_called_a_bug(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = headway("train", tiny(supervise={"max_failures": 5}), faults="crash@step=3#*")
    assert result.returncode == 1 and "this is a bug, not bad luck" in result.stderr
    assert "core/process/faults.py" in result.stderr.split("this is a bug")[1], "the stack is told"
    assert [record["kind"] for record in attempts(tmp_path / "runs/tiny")] == ["error", "error"]


def test_the_death_of_the_supervisor_takes_the_worker_along(tiny: Callable[..., Path], tmp_path: Path) -> None:
    process = start_headway("train", tiny(train={"steps": 100_000}))
    heartbeat = tmp_path / "runs/tiny/attempts/001/heartbeat-0"
    try:
        assert wait_until(lambda: (found := read_heartbeat(heartbeat)) is not None and found.step >= 1, LONG)
        found = read_heartbeat(heartbeat)
        assert found is not None and found.pid != process.pid and not gone(found.pid)
    finally:
        process.kill()
        process.wait()
    assert wait_until(lambda: gone(found.pid), LONG)
    run = RunDirectory(tmp_path / "runs/tiny")
    run.begin_attempt("the next one is let in").finish("finished", 0)
    assert run.attempt_records()[0]["outcome"] == "died"


def test_a_worker_back_from_the_dead_writes_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """It was stopped while its attempt was the run's, and is continued when another one is."""
    config = resolve(load_config(tiny(train={"steps": 100_000}, checkpoint={"every": "1 steps"})))
    model = complete(config.model, open_store(config.data).vocab_size)
    config = config.model_copy(update={"model": model})
    run = RunDirectory(tmp_path / "runs/tiny")
    lock = run.claim()
    first = run.begin_attempt("first", lock)
    write_config(config, run.path, first.directory)
    environment = {
        **os.environ,
        "HEADWAY_ATTEMPT": "1", "HEADWAY_FAULTS": "freeze@step=3", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "headway.run.supervisor.worker", str(run.path)]
    zombie = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        told = first.directory / "error-0.json"
        assert wait_until(lambda: is_in_state(zombie.pid, "T") or told.exists(), LONG)
        assert is_in_state(zombie.pid, "T"), told.read_text()
        run.begin_attempt("second", lock)
        before = written(run)
        zombie.send_signal(signal.SIGCONT)
        zombie.wait(timeout=LONG)
    finally:
        zombie.kill()
    assert zombie.returncode == 4 and "no longer owns this run" in told.read_text()
    assert written(run) == before
    lock.release()


@pytest.mark.slow
def test_a_slow_worker_is_named_and_training_goes_on(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(train={"steps": 400})
    result = headway("train", config, "-w", "2", faults="slow@step=2%1")
    assert result.returncode == 0, result.stderr
    assert "warning: worker 1 takes" in result.stderr and "worker 0 takes" not in result.stderr
    record = attempts(tmp_path / "runs/tiny")[0]
    assert record["outcome"] == "finished" and record["warnings"][0]["rank"] == 1
    assert "worker 1 takes" in (tmp_path / "runs/tiny/attempts/001/supervisor.log").read_text()

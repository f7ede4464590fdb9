"""Two machines on loopback: who is blamed for a kill, how all commands end, and what other processes can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core.coordination.heartbeat import Reading, read_heartbeat
from headway.core.process.table import all_processes
from headway.core.process.tree import members
from headway.core.process.waiting import wait_until
from support.ports import free_ports
from support.runs import headway, state_hash
from support.waits import LONG

pytestmark = pytest.mark.slow

KILLS = 20


def log_of(folder: Path, number: int) -> Path:
    return folder / f"machine-{number}.log"


@pytest.fixture
def start(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    config, port = tiny(train={"steps": 8}), free_ports(1)[0]
    started: list[subprocess.Popen[bytes]] = []

    def begin(number: int, *words: str, faults: str = "") -> subprocess.Popen[bytes]:
        options = ("--machines", "2", "--node", str(number), "--lead", f"127.0.0.1:{port}")
        command = [sys.executable, "-m", "headway", "train", str(config), "name=hurt", *words, *options]
        environment = {**os.environ, "HEADWAY_SECRET": "0123456789abcdef", "HEADWAY_FAULTS": faults}
        with log_of(tmp_path, number).open("wb") as log:
            started.append(subprocess.Popen(command, stderr=log, env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_of_another_machine_that_dies_is_named_and_the_run_goes_on(
    start: Callable[..., subprocess.Popen[bytes]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    faults = "kill@step=5%1"
    lead, node = start(0, faults=faults), start(1, faults=faults)
    codes = lead.wait(LONG), node.wait(LONG)
    said, other = (log_of(tmp_path, number).read_text() for number in (0, 1))
    # `max_failures` is 0 in tests: the failure ends the run, on both machines alike.
    assert codes == (1, 1), said + other
    assert "worker 1 on" in said and "died (signal 9) after step 5" in said
    run = tmp_path / "runs" / "hurt"
    done = headway("train", tiny(train={"steps": 8}), "name=hurt", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert headway("train", tiny(train={"steps": 8}), "name=whole", "--workers", "2").returncode == 0
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")


def reading_of(folder: Path, rank: int) -> Reading | None:
    """The newest heartbeat of a worker; None before its first one."""
    try:
        page = os.open(folder / f"heartbeat-{rank}", os.O_RDONLY)
    except OSError:
        return None
    try:
        return read_heartbeat(page)
    finally:
        os.close(page)


def record_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "attempt.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def has_stepped(folder: Path) -> bool:
    readings = [reading_of(folder, rank) for rank in range(2)]
    return all(reading is not None and reading.has_finished_a_step for reading in readings)


@pytest.mark.timeout(900)
def test_of_twenty_killed_workers_twenty_are_named(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """On both machines, at other moments of a step each time; the alert gets the same name."""
    alerts = tmp_path / "alerts"
    words = (
        "train.steps=100000", "checkpoint.every=1000 steps", f"supervise.max_failures={KILLS + 1}",
        "supervise.max_delay_seconds=0.1", f"telemetry.alert=cat >> {alerts}",
    )  # fmt: skip
    lead, _ = start(0, *words), start(1, *words)
    attempts = tmp_path / "runs/hurt/attempts"
    killed, named = list[int](), list[int]()
    for number in range(1, KILLS + 1):
        folder, victim = attempts / f"{number:03}", int(number % 3 > 0)
        assert wait_until(lambda folder=folder: has_stepped(folder) or lead.poll() is not None, LONG, 0.02)
        time.sleep(0.05 * (number % 7))
        reading = reading_of(folder, victim)
        assert reading is not None, log_of(tmp_path, 0).read_text()
        os.kill(reading.pid, signal.SIGKILL)
        killed.append(victim)
        assert wait_until(lambda folder=folder: "decision" in record_of(folder), LONG, 0.02)
        named.append(record_of(folder)["rank"])
    assert named == killed
    lead.send_signal(signal.SIGTERM)
    assert lead.wait(LONG) == 75
    told = [line for line in alerts.read_text().splitlines() if "ended: worker" in line]
    assert [f"worker {rank} on" in line for rank, line in zip(killed, told, strict=True)] == [True] * KILLS


FOR_LONG = ("train.steps=100000", "checkpoint.every=1000 steps")


def until_steps(lead: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until both workers of the first attempt have done a step."""
    attempt = folder / "runs/hurt/attempts/001"
    assert wait_until(lambda: has_stepped(attempt) or lead.poll() is not None, LONG, 0.02)
    assert lead.poll() is None, log_of(folder, 0).read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_no_process_of_a_machine_shows_the_secret(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """Supervisor or node process, attempt process, two workers and their writers, on either machine."""
    words = (*FOR_LONG, "--workers", "2", "checkpoint.memory_every=1 step")
    lead, node = start(0, *words), start(1, *words)
    until_steps(lead, tmp_path)
    of_a_node = [members(all_processes(), [], process.pid) for process in (lead, node)]
    assert min(map(len, of_a_node)) >= 5
    pids = [lead.pid, node.pid, *(process.pid for found in of_a_node for process in found)]
    shown = [pid for pid in pids if b"0123456789abcdef" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert shown == []


@pytest.mark.parametrize("number", [0, 1])
def test_two_interrupts_on_one_machine_end_all_alike(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, number: int
) -> None:
    machines = start(0, *FOR_LONG), start(1, *FOR_LONG)
    until_steps(machines[0], tmp_path)
    for _ in range(2):
        machines[number].send_signal(signal.SIGINT)
        time.sleep(0.3)  # a signal that is still pending is not added to
    codes = [machine.wait(LONG) for machine in machines]
    assert codes in ([130, 130], [75, 75]), log_of(tmp_path, 0).read_text() + log_of(tmp_path, 1).read_text()


def test_a_machine_with_another_config_ends_alone_and_names_the_keys(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    lead, other = start(0), start(1, "seed=4", "optimizer.weight_decay=0.5")
    assert other.wait(LONG) == 2
    said = log_of(tmp_path, 1).read_text()
    assert "optimizer.weight_decay is 0.5, and the lead's is" in said and "seed is 4, and the lead's is" in said
    assert lead.poll() is None, "it waits for one with its config"
    assert start(1).wait(LONG) == lead.wait(LONG) == 0
    assert "seed is 4, and the lead's is" in log_of(tmp_path, 0).read_text()

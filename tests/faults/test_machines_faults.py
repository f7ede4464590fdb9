"""Two machines on loopback: a node process that is killed is started again, and the run ends as if it never was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ports import free_ports
from support import headway, state_hash
from waits import LONG

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    config, port = tiny(train={"steps": 8}), free_ports(1)[0]
    started: list[subprocess.Popen[str]] = []

    def begin(number: int) -> subprocess.Popen[str]:
        options = ("--machines", "2", "--node", str(number), "--lead", f"127.0.0.1:{port}")
        command = [sys.executable, "-m", "headway", "train", str(config), "name=hurt", *options]
        environment = {**os.environ, "HEADWAY_SECRET": "0123456789abcdef", "HEADWAY_FAULTS": "kill@step=5%1"}
        started.append(subprocess.Popen(command, text=True, stderr=subprocess.PIPE, env=environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_worker_of_another_machine_that_dies_is_named_and_the_run_goes_on(
    start: Callable[..., subprocess.Popen[str]], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    lead, node = start(0), start(1)
    said, other = lead.communicate(timeout=LONG)[1], node.communicate(timeout=LONG)[1]
    # `max_failures` is 0 in tests: the failure ends the run, on both machines alike.
    assert (lead.returncode, node.returncode) == (1, 1), said + other
    assert "worker 1 on" in said and "died (signal 9) after step 5" in said
    run = tmp_path / "runs" / "hurt"
    done = headway("train", tiny(train={"steps": 8}), "name=hurt", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert headway("train", tiny(train={"steps": 8}), "name=whole", "--workers", "2").returncode == 0
    assert state_hash(run) == state_hash(tmp_path / "runs" / "whole")

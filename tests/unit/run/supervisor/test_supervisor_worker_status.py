"""Workers that have not begun, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config import load_config
from headway.config.sections.supervise import SuperviseConfig
from headway.core.console import alert_with
from headway.core.coordination.heartbeat import Heartbeat, Phase
from headway.core.process.table import children_of, what_it_does
from headway.core.process.waiting import wait_until
from headway.run.session.attempt import RunOptions
from headway.run.supervisor import attempt_monitor
from headway.run.supervisor.attempt_monitor import AttemptMonitor, AttemptSurroundings
from headway.run.supervisor.messages import Done
from headway.run.supervisor.watchdog import Watchdog
from headway.run.supervisor.worker_pool import WorkerPool
from headway.run.supervisor.worker_status import WorkerStatuses
from support.waits import LONG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the state of a process cannot be told")


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a child; both are stopped."""
    wait = "import time; time.sleep(600)"
    family = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', '{wait}'])\nprint(1, flush=True)\n{wait}"
    process = subprocess.Popen([sys.executable, "-c", family], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    os.killpg(process.pid, signal.SIGSTOP)
    for pid in (process.pid, *children_of(process.pid)):
        assert wait_until(lambda pid=pid: "SIGSTOP" in what_it_does(pid), LONG)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("workers", "begun", "named", "child"),
    [
        (1, False, "the attempt's first process is not ready yet", False),
        (1, True, "worker 0 gave no sign of life yet", False),
        (2, True, "worker 1 gave no sign of life yet", True),
    ],
)
def test_a_hang_before_the_first_sign_of_life_is_named_once_with_what_the_process_does(
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopped: subprocess.Popen[bytes],
    workers: int,
    begun: bool,
    named: str,
    child: bool,
) -> None:
    """It may take 15 minutes, in which nothing else would be said."""
    assert Watchdog(SuperviseConfig()).start_patience_seconds == 55.0
    assert Watchdog(SuperviseConfig(hang_seconds=90.0)).start_patience_seconds == 90.0
    monkeypatch.setattr(Watchdog, "start_patience_seconds", 1.0)
    config = load_config(tiny(), [f"parallel.workers={workers}"])
    attempt = AttemptMonitor(config, RunOptions(), AttemptSurroundings(WorkerPool(config, None), [], own_process=False))
    if begun:
        folder = attempt.journal.begin(config).directory
        if workers > 1:  # this one is well
            Heartbeat(folder / "heartbeat-0").beat(Phase.START, 0)
    told, left = list[str](), [20]

    def poll() -> int | None:
        left[0] -= bool(told)  # some looks more: it is not said again
        return None if left[0] else 0

    process: Any = SimpleNamespace(pid=stopped.pid, code=0, poll=poll, listen=lambda _: [])
    monkeypatch.setattr(attempt_monitor, "_LOOK_SECONDS", 0.0)
    attempt.take(Done(), process)
    with alert_with(told.append):
        attempt.watch(process)
    (suspect,) = children_of(stopped.pid) if child else [stopped.pid]
    what = f"{named}, 1 s after the start: process {suspect} was stopped by a signal (SIGSTOP)"
    (said,) = told
    assert said.startswith(what) and said.endswith("that may take 15 m 0 s")
    assert f"warning: {said}" in capsys.readouterr().err
    (fact,) = attempt.journal.facts["warnings"]
    assert fact["rank"] == workers - 1 and fact["what"].startswith(what)


def test_workers_are_named_in_their_ranks_order_whoever_begins_first(tmp_path: Path) -> None:
    seen = WorkerStatuses(3)
    pages = []
    for rank in (1, 2, 0):
        pages.append(Heartbeat(tmp_path / f"heartbeat-{rank}"))
        seen.look(tmp_path)
    assert list(seen.readings) == list(seen.states) == [0, 1, 2]
    seen.close()

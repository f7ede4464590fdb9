"""A node process does what the lead says."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.config import load_config
from headway.core.coordination.heartbeat import Heartbeat, Phase
from headway.core.process.table import DEAD, ProcessState
from headway.supervisor import worker_status
from headway.supervisor.machines.line import Line
from headway.supervisor.machines.node import _Node, _NodeAttempt
from headway.supervisor.machines.place import Place, Seat
from headway.supervisor.worker_status import WorkerStatuses


class Heard:
    """Stands for the lead, and for an attempt."""

    number = 3

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.has_ended = False

    def send(self, kind: str, *, attempt: int) -> None:
        self.said.append((kind, attempt))

    def look(self, line: object, now: bool = False) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True


def test_a_machine_that_becomes_a_spare_has_no_workers_left(tiny: Callable[..., Path]) -> None:
    """Its connection may have been made again before it noticed that it was lost."""
    node = _Node(load_config(tiny()), Seat(Place(1, "head", 7000, b"x" * 16), "identity"), own_process=False)
    attempt = Heard()
    node._attempt = cast(Any, attempt)
    node._handle({"kind": "spare"}, cast(Line, attempt))
    assert attempt.has_ended and node._attempt is None and attempt.said == [("ended", 3)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_only_workers_that_lived_until_then_count_as_killed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Otherwise the death that came first would be taken for one of those that followed from it."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *told: sent.append(told))
    monkeypatch.setattr(
        worker_status, "process_state", lambda pid: ProcessState(pid, DEAD if pid == 1002 else "S", 1, pid)
    )
    for rank in (2, 3):
        page = Heartbeat(tmp_path / f"heartbeat-{rank}")
        page._pid = 1000 + rank
        page.beat(Phase.COMPUTE, 7)
    process: Any = SimpleNamespace(pid=999, poll=lambda: None)
    attempt = _NodeAttempt(1, tmp_path, tmp_path, process, WorkerStatuses(4, range(2, 4)), own_process=False)
    attempt.signal(number)
    attempt.workers.close()
    assert sent == [(1003, number)]
    assert attempt.killed == ({3} if number == signal.SIGKILL else set())


def test_workers_that_have_not_begun_are_killed_with_their_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda *told: sent.append(told))
    process: Any = SimpleNamespace(pid=999, poll=lambda: None)
    attempt = _NodeAttempt(1, tmp_path, tmp_path, process, WorkerStatuses(4, range(2, 4)), own_process=False)
    attempt.signal(signal.SIGTERM)
    assert sent == [(999, signal.SIGKILL)] and attempt.killed == {2, 3}

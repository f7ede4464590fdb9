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
from headway.core.errors import Preempted
from headway.core.process.table import DEAD, ProcessState
from headway.run.supervisor import worker_status
from headway.run.supervisor.machines.lead_connection import LeadConnection, LeadStatus
from headway.run.supervisor.machines.machine_role import MachineRole, Membership
from headway.run.supervisor.machines.messages import AttemptEnded, MachineMessage, RunEnd, SignalReceived, Spare
from headway.run.supervisor.machines.node import _Node, _NodeAttempt
from headway.run.supervisor.worker_status import WorkerStatuses


class Heard:
    """Stands for the lead, and for an attempt."""

    number = 3

    def __init__(self) -> None:
        self.said: list[AttemptEnded] = []
        self.has_ended = False

    def send(self, message: AttemptEnded) -> None:
        self.said.append(message)

    def look(self, line: object, now: bool = False) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True


def test_a_machine_that_becomes_a_spare_has_no_workers_left(tiny: Callable[..., Path]) -> None:
    """Its connection may have been made again before it noticed that it was lost."""
    node = _Node(load_config(tiny()), Membership(MachineRole(1, "head", 7000, b"x" * 16), {}), own_process=False)
    attempt = Heard()
    node._attempt = cast(Any, attempt)
    node._handle(Spare(), cast(LeadConnection, attempt))
    assert attempt.has_ended and node._attempt is None and attempt.said == [AttemptEnded(3)]


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


class Told:
    """A connection to the lead that is up or not, and what was sent."""

    def __init__(self, *, is_up: bool, session: int) -> None:
        self.status = LeadStatus(session, is_up, lost_at=0.0)
        self.sent: list[int] = []

    def send(self, message: SignalReceived) -> None:
        self.sent.append(message.number)


@pytest.fixture
def interrupted(tiny: Callable[..., Path]) -> _Node:
    """A node on which Ctrl-C came twice."""
    node = _Node(load_config(tiny()), Membership(MachineRole(1, "head", 7000, b"x" * 16), {}), own_process=False)
    node._signals.extend([signal.SIGINT, signal.SIGINT])
    return node


def test_two_interrupts_are_told_to_the_lead_and_a_third_ends_the_command(interrupted: _Node) -> None:
    """It ends with the code that the lead sends, as all others do."""
    line = Told(is_up=True, session=1)
    interrupted._pass_on(cast(LeadConnection, line))
    interrupted._pass_on(cast(LeadConnection, line))
    assert line.sent == [signal.SIGINT, signal.SIGINT]
    interrupted._signals.append(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted._pass_on(cast(LeadConnection, line))


def test_two_interrupts_end_a_command_whose_lead_is_gone(interrupted: _Node) -> None:
    interrupted._pass_on(cast(LeadConnection, Told(is_up=False, session=0)))  # the lead may be there in a moment
    with pytest.raises(KeyboardInterrupt):
        interrupted._wait_for_lead(cast(LeadConnection, Told(is_up=False, session=1)))


def test_the_end_of_the_run_is_heard_though_the_lead_has_left(interrupted: _Node) -> None:
    """What the lead has sent counts, even if the connection is closed before it is read."""

    batches: list[list[MachineMessage]] = [[], [RunEnd(75, "saved")]]
    line = Told(is_up=True, session=1)

    def take() -> list[MachineMessage]:
        line.status.is_up = False  # with the end of the run, which comes while this batch is handled
        return batches.pop(0)

    line.take = take  # type: ignore[attr-defined]
    with pytest.raises(Preempted, match="saved"):
        interrupted._serve(cast(LeadConnection, line))

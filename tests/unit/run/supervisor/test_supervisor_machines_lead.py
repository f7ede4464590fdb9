"""The lead and a node on loopback: joining, being lost, and what foreign processes can do."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.process.waiting import wait_until
from headway.run.supervisor.machines import lead_connection as lead_connection
from headway.run.supervisor.machines.differences import name_differences
from headway.run.supervisor.machines.interfaces import interface_of
from headway.run.supervisor.machines.lead import Lead
from headway.run.supervisor.machines.lead_connection import LeadConnection
from headway.run.supervisor.machines.machine_role import MachineRole
from headway.run.supervisor.machines.members import Expected, Members
from headway.run.supervisor.machines.messages import (
    EndAttempt,
    Hello,
    MachineMessage,
    RunEnd,
    SignalReceived,
    WorkerReadings,
    WorkersEnded,
)
from support.ports import free_ports

SECRET = b"0123456789abcdef"
HELLO = Hello(1, "p", "b", workers=1, version="1", identity="i")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


NODE = MachineRole(1, "127.0.0.1", 7000, SECRET)


@pytest.fixture
def lead(stack: ExitStack, port: int) -> Lead:
    lead = Lead(MachineRole(0, "127.0.0.1", port, SECRET), Members(Expected(3, 1, "1", "i")), lost_seconds=30.0)
    lead._members._met = {1, 2}  # the end does not wait for machines that never come
    stack.callback(lead.close, RunEnd(0))
    return lead


@pytest.fixture
def join(stack: ExitStack, port: int) -> Callable[..., LeadConnection]:
    def start(number: int = 1, secret: bytes = SECRET, lost_seconds: float = 30.0, **hello: Any) -> LeadConnection:
        node = LeadConnection(
            MachineRole(number, "127.0.0.1", port, secret), replace(HELLO, node=number, **hello), lost_seconds
        )
        stack.callback(node.close)
        return node

    return start


def soon(condition: Callable[[], object]) -> None:
    assert wait_until(condition, 20.0, 0.01)


def test_a_node_joins_hears_the_lead_and_is_heard(lead: Lead, join: Callable[..., LeadConnection]) -> None:
    node = join()
    soon(lambda: node.status.is_up and 1 in lead.here)
    assert str(lead.here[1]) == "machine 1 (b)" and lead.address == "127.0.0.1"
    assert interface_of(node.status.interface_address or "") == interface_of("127.0.0.1")
    lead.tell([1, 2], EndAttempt(4))
    soon(lambda: node.inbox)
    assert node.take() == [EndAttempt(4)]
    for number in range(500):  # a lead that is busy keeps the newest readings, and no older ones
        node.send(WorkerReadings(number, 1.0, {}, {}))
    node.send(WorkersEnded(4, 1))
    node.send(SignalReceived(signal.SIGTERM))
    node.send(SignalReceived(signal.SIGKILL))
    soon(lambda: (newest := lead.newest_readings(1)) is not None and newest.attempt == 499)
    soon(lambda: lead.here[1].inbox)
    assert lead.take_messages(1) == [WorkersEnded(4, 1)]
    assert lead.take_signals() == [("machine 1 (b)", signal.SIGTERM)], "no other signal is passed on"


def test_a_node_that_closes_its_connection_is_gone_at_once(lead: Lead, join: Callable[..., LeadConnection]) -> None:
    node = join()
    soon(lambda: 1 in lead.here)
    session = lead.here[1].session
    assert lead.why_gone(session) is None
    assert lead.closed == {}
    node.close()
    soon(lambda: lead.why_gone(session) is not None)
    assert lead.here == {} and 0.0 <= lead.closed[1] < 20.0
    join()
    soon(lambda: 1 in lead.here)
    assert lead.closed == {}, "it has come back"


def test_a_node_knows_a_lead_whose_machine_is_there_without_it(lead: Lead, join: Callable[..., LeadConnection]) -> None:
    node = join()
    soon(lambda: node.status.is_up)
    assert not node.status.is_absent
    lead.close(RunEnd(0))
    soon(lambda: node.status.is_absent)


def test_a_silent_machine_is_lost_and_so_is_a_silent_lead(stack: ExitStack, port: int) -> None:
    lead = Lead(MachineRole(0, "127.0.0.1", port, SECRET), Members(Expected(2, 1, "1", "i")), lost_seconds=1.5)
    stack.callback(lead.close, RunEnd(0))
    node = LeadConnection(MachineRole(1, "127.0.0.1", port, SECRET), HELLO, lost_seconds=1.5)
    stack.callback(node.close)
    soon(lambda: node.status.is_up)
    session = lead.here[1].session
    with node.pausing():  # it says nothing, and its connection stays open
        soon(lambda: lead.why_gone(session))
    assert "said nothing for" in str(lead.why_gone(session)) and lead.closed == {}
    soon(lambda: node.status.session == 2)
    with lead.pausing():
        soon(lambda: not node.status.is_up)
    assert "said nothing for" in node.status.why
    soon(lambda: node.status.session == 3)


def test_a_node_with_another_secret_or_config_is_refused_and_told(
    lead: Lead, join: Callable[..., LeadConnection]
) -> None:
    named = partial(name_differences, {"seed": 3, "train.steps": 8})
    lead._members.expected = replace(lead._members.expected, name_differences=named)
    computes = {"seed": 4, "train.steps": 8}
    stranger, other = join(secret=b"another secret of it"), join(number=2, identity="j", computes=computes)
    soon(lambda: stranger.status.refusal and other.status.refusal)
    with pytest.raises(ConfigError, match="another secret"):
        stranger.status.check_refused(NODE)
    what = "machine 2 (b) was started with another config than the lead: seed is 4, and the lead's is 3"
    with pytest.raises(ConfigError, match=re.escape(what)):
        other.status.check_refused(NODE)
    assert [refusal.what for refusal in lead.take_refusals()] == [what]
    assert lead.here == {}


def test_foreign_connections_disturb_nothing(lead: Lead, join: Callable[..., LeadConnection], port: int) -> None:
    with ExitStack() as stack:
        for number in range(60):
            end = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 3 == 0:
                end.sendall(os.urandom(5000))
            elif number % 3 == 1:
                end.sendall(b"GET / HTTP/1.1\r\n\r\n")
        node = join()
        soon(lambda: 1 in lead.here and node.status.is_up)


def test_every_node_hears_how_the_run_ended(lead: Lead, join: Callable[..., LeadConnection]) -> None:
    nodes = [join(1), join(2)]
    soon(lambda: len(lead.here) == 2)
    heard: list[MachineMessage] = []

    def leave() -> bool:
        for node in nodes:
            heard.extend(node.take())
        return len(heard) == 2

    lead.tell(lead.here, RunEnd(75, "stopped"))
    soon(leave)
    assert heard == [RunEnd(75, "stopped")] * 2


def test_a_process_can_be_copied_while_its_thread_pauses(lead: Lead, join: Callable[..., LeadConnection]) -> None:
    node = join()
    soon(lambda: node.status.is_up)
    ours = [thread for thread in threading.enumerate() if thread.name == "headway-machines"]
    assert len(ours) == 2
    with lead.pausing(), node.pausing():
        paused = not any(thread.is_alive() for thread in ours)
        copy = os.fork()
        if copy == 0:
            os._exit(0)
    os.waitpid(copy, 0)
    assert paused
    node.send(WorkersEnded(4, 0))
    soon(lambda: lead.here[1].inbox)  # the copy has closed no connection


def test_a_port_in_use_and_an_unknown_name_are_errors_of_the_command(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match="cannot listen"):
        Lead(MachineRole(0, "127.0.0.1", port, SECRET), Members(Expected(2, 1, "1", "i")), 15.0)
    with pytest.raises(ConfigError, match="cannot be one"):
        Lead(MachineRole(0, "node..one", port, SECRET), Members(Expected(2, 1, "1", "i")), 15.0)
    strange = MachineRole(0, "127.0.0.1", port, SECRET, listen="192.0.2.1")  # for documentation: no machine has it
    with pytest.raises(ConfigError, match="cannot listen") as found:
        Lead(strange, Members(Expected(2, 1, "1", "i")), 15.0)
    assert found.value.where == "HEADWAY_LISTEN=192.0.2.1"
    assert "192.0.2.1 is no address of this machine" in found.value.what


def test_a_lead_with_the_address_of_another_machine_says_so(
    stack: ExitStack, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this machine, which leads") as found:
        Lead(MachineRole(0, "192.0.2.1", port, SECRET), Members(Expected(2, 1, "1", "i")), 15.0)
    assert found.value.where == f"--lead 192.0.2.1:{port}" and "address of machine 0" in str(found.value.fix)
    assert "free port" not in str(found.value.fix)
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: real("192.0.2.1", *rest, **more))
    with socket.create_server(("", port)), pytest.raises(ConfigError, match="free port"):
        Lead(MachineRole(0, "a-service", port, SECRET), Members(Expected(2, 1, "1", "i")), 15.0)
    lead = Lead(MachineRole(0, "a-service", port, SECRET), Members(Expected(2, 1, "1", "i")), 15.0)
    stack.callback(lead.close, RunEnd(0))
    assert "a-service stands for 192.0.2.1, which is no address of this machine" in capsys.readouterr().err


def unknown_until(there: list[str]) -> Callable[..., Any]:
    """Look names up; names that end with `.late` are loopback once they are in the list."""
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        if str(host).endswith(".late") and host not in there:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if str(host).endswith(".late") else host, *rest, **more)

    return look_up


@pytest.mark.parametrize("listen", [None, "127.0.0.1"])
def test_a_lead_whose_name_appears_later_listens_at_once_and_is_found(
    stack: ExitStack, port: int, monkeypatch: pytest.MonkeyPatch, listen: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    there: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", unknown_until(there))
    monkeypatch.setattr(lead_connection, "_RETRY_SECONDS", 0.05)
    lead = Lead(MachineRole(0, "lead.late", port, SECRET, listen=listen), Members(Expected(2, 1, "1", "i")), 30.0)
    stack.callback(lead.close, RunEnd(0))
    assert ("not known here, or not yet" in capsys.readouterr().err) == (listen is None)
    node = LeadConnection(MachineRole(1, "lead.late", port, SECRET), HELLO, 30.0)
    stack.callback(node.close)
    soon(lambda: "Name or service not known" in node.status.why)
    assert not node.status.is_absent and lead.here == {}
    there.append("lead.late")
    soon(lambda: node.status.is_up and 1 in lead.here)
    assert lead.address == "127.0.0.1"

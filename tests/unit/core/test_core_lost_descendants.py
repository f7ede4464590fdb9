"""Processes of an attempt that only their parents led to, and these are dead."""

from __future__ import annotations

import os

import pytest

from headway.core.process import tree
from headway.core.process.table import DEAD, ProcessState
from headway.core.process.tree import end_all

LEADER, WORKER, CHILD, WRITER = range(4_000_001, 4_000_005)


def test_a_worker_with_a_session_of_its_own_is_waited_for_when_its_parent_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what it has started in the meantime; a stranger that comes by its number later is let be."""
    leader, dead = ProcessState(LEADER, "S", 1, LEADER), ProcessState(LEADER, DEAD, 1, LEADER)
    writer, stranger = ProcessState(WRITER, "R", 1, LEADER), ProcessState(WORKER, "S", 1, 1)
    table = [
        [leader, ProcessState(WORKER, "S", LEADER, WORKER)],
        [dead, ProcessState(WORKER, "D", 1, WORKER)],
        [dead, ProcessState(CHILD, "R", 1, WORKER), writer],
        [dead, writer],
        [dead, writer, stranger],
        [dead, stranger],
        [dead],
    ]
    looks, killed = iter(table), list[int]()
    monkeypatch.setattr(tree, "LINUX", True)
    monkeypatch.setattr(tree, "all_processes", lambda: next(looks))
    monkeypatch.setattr(tree, "finishes_its_work", lambda pid: pid == WRITER)
    monkeypatch.setattr(tree, "arguments_of", lambda pid: ["python"])
    monkeypatch.setattr(os, "kill", lambda pid, signal: killed.append(pid))
    assert end_all([LEADER], unfinished=lambda: True) == []
    assert killed == [LEADER, WORKER, WORKER, CHILD]
    assert next(looks) == [dead], "one more look was not taken"

"""What is told of the worker that has ended an attempt, and of those that waited for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.config import Config
from headway.core.coordination.heartbeat import Exchange, Heartbeat, Reading, read_heartbeat
from headway.run.directory.run_directory import Attempt, RunDirectory
from headway.run.supervisor.diagnose import Evidence, diagnose, last_exchange
from headway.run.supervisor.error_report import ErrorReport
from headway.run.supervisor.machines.attempt_machines import MachineEnd
from headway.run.supervisor.watchdog import Finding

BEFORE, INSIDE = Exchange(6, "gather of numbers"), Exchange(7, "sum of gradients")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDirectory(tmp_path / "run").begin_attempt("test")


@pytest.fixture
def page(tmp_path: Path) -> Reading:
    Heartbeat(tmp_path / "heartbeat-0")
    found = read_heartbeat(tmp_path / "heartbeat-0")
    assert found is not None
    return found


def test_how_far_a_worker_came_in_its_exchanges(page: Reading) -> None:
    assert last_exchange(page) == "", "a single worker has none"
    done = replace(page, begun=BEFORE, finished=BEFORE)
    assert last_exchange(done) == "; last exchange 6 (gather of numbers), finished"
    waiting = replace(page, begun=INSIDE, finished=BEFORE, waits_for=INSIDE.name)
    assert last_exchange(waiting) == "; last exchange 7 (sum of gradients), still in it"
    assert last_exchange(replace(waiting, waits_for="")) == "; last exchange 7 (sum of gradients), not finished"


def test_who_waited_is_told_and_where_if_it_is_one_place(page: Reading, attempt: Attempt) -> None:
    behind = replace(page, begun=BEFORE, finished=BEFORE)
    waiting = replace(page, begun=INSIDE, finished=BEFORE, waits_for=INSIDE.name)
    elsewhere = replace(waiting, begun=Exchange(9, "sum of integers"), waits_for="sum of integers")
    hung = Finding("hung", 1, "gave no sign of life", 31.0, suspects=(1,))
    ending = diagnose(hung, {0: waiting, 1: behind, 2: waiting}, attempt)
    assert ending.what.endswith(", finished; workers 0, 2 waited for it in exchange 7 (sum of gradients)")
    assert ending.record()["exchanges"]["1"] == {"begun": BEFORE._asdict(), "finished": BEFORE._asdict()}
    assert ending.record()["exchanges"]["2"] == {"begun": INSIDE._asdict(), "finished": BEFORE._asdict()}
    ending = diagnose(hung, {0: waiting, 1: behind, 2: elsewhere}, attempt)
    assert ending.what.endswith("; workers 0, 2 waited for it")
    assert diagnose(hung, {0: waiting, 1: behind}, attempt).what.count("; worker 0 waited for it in") == 1
    died = diagnose(Finding("died", 1, "died", suspects=(1,)), {0: waiting, 1: behind}, attempt)
    assert died.what.endswith("in phase 'starting'; last exchange 6 (gather of numbers), finished"), "it is over"
    alone = diagnose(Finding("died", 0, "died", suspects=(0,)), {0: page}, attempt)
    assert "exchanges" not in alone.record() and alone.what.endswith("in phase 'starting'")


@pytest.mark.parametrize(("error", "kind"), [("SavesFailed", "error"), ("Preempted", "preempted")])
def test_a_run_that_saves_nothing_has_failed(error: str, kind: str) -> None:
    """Its exit code is that of a run that has saved and stopped, so that a scheduler starts it again."""
    reported = ErrorReport(75, "10 saves in a row have failed", rank=0, type=error)
    outcome = Evidence(Config(), None, {}, [], lambda rank: None).explain_end(MachineEnd(75, False, reported), None)
    assert (outcome.kind, outcome.what, outcome.exit_code) == (kind, reported.what, 75)

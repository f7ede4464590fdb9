"""The guard of a budget: it warns once, and posts one notice on the board while there is enough for the save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.config.sections.preemption import PreemptionConfig
from headway.core.coordination.preemption_board import Board
from headway.core.process.waiting import wait_until
from headway.cost.spending import CostBudget, RunCost, SpendMeter
from headway.run.session.budget import BudgetGuard
from headway.telemetry.metrics import read_metrics
from support.waits import LONG


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def guard(tmp_path: Path, clock: Clock, spent: float = 0.0) -> BudgetGuard:
    meter = SpendMeter(RunCost(spent, 0.0, 0.0), 3600.0, clock=clock)  # a dollar a second
    return BudgetGuard(tmp_path, CostBudget(100.0, 0.8), meter, read_metrics(tmp_path))


def job() -> Any:
    return SimpleNamespace(config=SimpleNamespace(preemption=PreemptionConfig()))


def test_steps_and_saves_are_counted_ahead(tmp_path: Path) -> None:
    clock = Clock()
    watched = guard(tmp_path, clock)
    assert watched.reserve_seconds == pytest.approx(1.25), "nothing is measured: only the time until the board is read"
    for seconds in (9.0, 1.0, 2.0, 1.0, 1.0, 1.5):  # the first one, which compiles, is forgotten
        watched.on_step(job(), 1, {"speed/step_seconds": seconds})
    watched.on_checkpoint(job(), 1, 0.5)
    watched.on_saved(job(), SimpleNamespace(error=None, seconds=3.0))  # type: ignore[arg-type]
    watched.on_saved(job(), SimpleNamespace(error="no room", seconds=50.0))  # type: ignore[arg-type]
    watched.on_uploaded(job(), SimpleNamespace(seconds=2.0))  # type: ignore[arg-type]
    watched.on_uploaded(job(), SimpleNamespace(seconds=None))  # type: ignore[arg-type]
    assert watched.reserve_seconds == pytest.approx(1.25 + 2 * 2.0 + 0.5 + 3.0 + 2.0)
    clock.now = 100.0 - 10.75 - 0.01
    assert watched.check() is None
    clock.now += 0.02
    assert watched.check() is not None


def test_the_share_is_announced_once_and_the_notice_stays_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    watched = guard(tmp_path, clock)
    clock.now = 79.0
    assert watched.check() is None and capsys.readouterr().err == ""
    clock.now = 81.0
    assert watched.check() is None and watched.check() is None
    assert capsys.readouterr().err.count("warning: $81.00 is spent, 81 % of the budget of $100.00") == 1
    clock.now = 99.0
    first = watched.check()
    clock.now = 99.5
    assert first is not None and watched.check() is first
    assert (first.source, first.what, first.wish) == ("budget", "$99.00 of $100.00 is spent", "stop")


def test_a_thread_posts_the_notice_on_the_board(tmp_path: Path) -> None:
    clock = Clock()
    watched, board = guard(tmp_path, clock), Board(tmp_path)
    watched.pause_seconds = 0.01
    watched.on_start(job())
    try:
        assert board.notices(now=True) == []
        clock.now = 99.0
        wait_until(lambda: bool(board.notices(now=True)), LONG, 0.01)
    finally:
        watched.on_end(job())
    assert [str(notice) for notice in board.notices(now=True)] == ["budget: $99.00 of $100.00 is spent"]


def test_an_attempt_that_starts_with_nothing_left_stops_at_once(tmp_path: Path) -> None:
    watched = guard(tmp_path, Clock(), spent=99.5)
    watched.on_start(job())
    assert len(Board(tmp_path).notices()) == 1
    watched.on_end(job())

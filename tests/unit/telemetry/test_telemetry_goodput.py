"""Where the time of a run went, to the second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.telemetry.goodput import AGAIN, DATA, DOWN, HANGING, OTHER, SAVING, START, goodput
from headway.telemetry.record import Attempt

FIRST = Attempt(1, "worker 0 gave no sign of life", 1, started=100.0, ended=150.0)
SECOND = Attempt(2, "finished", 0, started=155.0, ended=180.0)


def step(attempt: int, number: int, time: float, seconds: float, share: float = 0.0) -> dict[str, Any]:
    values = {"speed/step_seconds": seconds, "speed/data_wait_share": share, "train/loss": 1.0}
    return {"attempt": attempt, "step": number, "time": time, **values}


RECORDS = [
    *(step(1, n, 108.0 + 2.0 * n, 2.0, share=0.25) for n in (1, 2, 3, 4)),
    {"attempt": 1, "step": 2, "time": 112.5, "checkpoint/stall_seconds": 0.375},
    {"attempt": 1, "step": 4, "time": 116.5, "checkpoint/hold_stall_seconds": 0.125},
    *(step(2, n, 156.0 + 2.0 * n, 2.0) for n in (3, 4, 5)),
]


def test_all_time_has_a_cause() -> None:
    found = goodput([FIRST, SECOND], {1: {"silent_seconds": 30.0}}, RECORDS)
    assert found is not None
    assert found.wall_seconds == 80.0
    # After the last save of the first attempt, and what was noticed to be a hang, 3.5 s until its end.
    # Steps 1 and 2 of the first attempt, less a quarter of waiting, and 3 to 5 of the second one.
    assert found.effective_seconds == pytest.approx(2 * 1.5 + 3 * 2.0)
    lost = {START: 8.0 + 5.0, AGAIN: 4.0, SAVING: 0.5, DATA: 1.0, HANGING: 30.0, DOWN: 3.5 + 5.0}
    assert {cause: found.lost_seconds[cause] for cause in lost} == pytest.approx(lost)
    assert found.effective_seconds + sum(found.lost_seconds.values()) == pytest.approx(found.wall_seconds)
    assert found.lost_seconds[OTHER] > 0
    assert found.lost_steps == {1: 2}
    assert str(found).startswith("goodput 11.2% of 1 m 20 s · until a hang was noticed 30 s")
    assert str(found).endswith("2 steps computed again")


@pytest.mark.parametrize(("told", "lost"), [(5, 3), (4, 2), (6, 2), (3, 2), (None, 2)])
def test_a_step_whose_record_was_too_late_is_lost_too(told: int | None, lost: int) -> None:
    found = goodput([FIRST, SECOND], {1: {"step": told}, 2: {"step": 6}}, RECORDS)
    assert found is not None and found.lost_steps == {1: lost}, "nobody has done step 6 of the second one again"


def noted(signal: str) -> dict[str, Any]:
    """The record of an attempt without a supervisor."""
    rebalance = {"source": "aws", "what": "rebalance recommendation", "wish": "save", "key": "rebalance"}
    return {"notices": [rebalance, {"source": "signal", "what": signal, "wish": "stop", "key": "signal"}]}


@pytest.mark.parametrize(
    ("outcome", "code", "ending"),
    [
        ("finished", 0, {}),
        ("preempted", 75, {"stopped_by": "SIGINT"}),
        ("preempted", 75, noted("SIGINT")),
        ("interrupted", 130, {}),
    ],
)
def test_time_in_which_nobody_wanted_it_does_not_count(outcome: str, code: int, ending: dict[str, Any]) -> None:
    found = goodput([replace(FIRST, outcome=outcome, exit_code=code), SECOND], {1: ending}, [])
    assert found is not None and found.wall_seconds == 75.0 and found.lost_seconds[DOWN] == 0.0


@pytest.mark.parametrize("ending", [{"stopped_by": "SIGTERM"}, noted("SIGTERM"), {"notices": "SIGINT"}, {}])
def test_time_in_which_a_machine_was_away_does_count(ending: dict[str, Any]) -> None:
    waited = goodput([replace(FIRST, outcome="preempted", exit_code=75), SECOND], {1: ending}, [])
    assert waited is not None and waited.lost_seconds[DOWN] == 5.0


def test_an_evaluation_of_a_run_that_is_running_is_no_time_between_attempts() -> None:
    running = Attempt(1, "running", None, started=100.0, ended=180.0)
    evaluation = {"attempt": 1, "step": 4, "time": 180.0, "evaluation/loss": 1.0}
    found = goodput([running], {}, [*RECORDS[:4], evaluation])
    assert found is not None and found.lost_seconds[DOWN] == 0.0 and found.lost_seconds[OTHER] > 60.0
    killed = goodput([replace(running, outcome="died", ended=183.0), SECOND], {}, [*RECORDS[:4], evaluation])
    assert killed is not None and killed.lost_seconds[DOWN] == 3.0


def test_steps_that_a_rollback_took_back_count_once() -> None:
    """Those of the attempt itself, and those of the one before."""
    first = Attempt(1, "preempted", 75, started=100.0, ended=110.0)
    second = Attempt(2, "finished", 0, started=110.0, ended=128.0)
    records = [step(attempt, n, 101.0 + place, 1.0) for place, (attempt, n) in enumerate(
        [(1, n) for n in range(1, 10)] + [(2, n) for n in (10, 11, 12, 7, 8, 9, 10, 11, 12, 13)]
    )]  # fmt: skip
    found = goodput([first, second], {}, records)
    assert found is not None and found.effective_seconds == 13.0 and found.lost_seconds[AGAIN] == 6.0
    assert found.lost_steps == {1: 3, 2: 3}


def test_steps_that_a_rollback_leaves_out_do_not_count() -> None:
    """Also where the checkpoint lies right before them, so that none of them is computed a second time."""
    left_out = [{"attempt": 1, "step": n, "time": 400.0, "train/left_out_steps": n - 200.0} for n in range(201, 301)]
    before = [step(1, n, 100.0 + n, 1.0) for n in range(1, 301)]
    after = [step(1, n, 100.0 + n, 1.0) for n in range(301, 401)]
    found = goodput([Attempt(1, "finished", 0, started=100.0, ended=500.0)], {}, [*before, *left_out, *after])
    assert found is not None and found.effective_seconds == 300.0 and found.lost_seconds[AGAIN] == 100.0
    assert found.lost_steps == {1: 100}
    # The one attempt leaves them out, and so does the next one, which goes on from the same checkpoint.
    again = [{**line, "attempt": 2, "time": 600.0} for line in left_out]
    attempts = [Attempt(1, "died", started=100.0, ended=400.0), Attempt(2, "finished", 0, started=550.0, ended=700.0)]
    second = [step(2, n, 300.0 + n, 1.0) for n in range(301, 401)]
    found = goodput(attempts, {}, [*before, *left_out, *again, *second])
    assert found is not None and found.effective_seconds == 300.0 and found.lost_steps == {1: 100}
    assert found.lost_seconds[START] == 50.0


@given(
    start=st.floats(0, 50),
    steps=st.lists(st.tuples(st.floats(0.125, 9), st.floats(0, 1), st.floats(0, 3)), max_size=5),
    evaluated=st.booleans(),
    silent=st.floats(0, 99),
    ending=st.floats(0, 9),
)
def test_losses_and_effective_time_are_all_of_the_time(
    start: float, steps: list[tuple[float, float, float]], evaluated: bool, silent: float, ending: float
) -> None:
    """Whether an attempt hangs after some steps, or before its first one."""
    now, records = 100.0 + start, list[dict[str, Any]]()
    if evaluated:
        records.append({"attempt": 1, "step": 3, "time": now, "evaluation/loss": 1.0})
    for number, (seconds, share, stall) in enumerate(steps, start=4):
        records.append(step(1, number, now + seconds, seconds, share))
        now += seconds + stall
        records.append({"attempt": 1, "step": number, "time": now, "checkpoint/stall_seconds": stall})
    ended = now + silent + ending
    hung = Attempt(1, "worker 0 gave no sign of life", 1, started=100.0, ended=ended)
    after = Attempt(2, "finished", 0, started=ended + 5.0, ended=ended + 10.0)
    found = goodput([hung, after], {1: {"silent_seconds": silent}}, records)
    assert found is not None
    total = found.effective_seconds + sum(found.lost_seconds.values())
    assert total == pytest.approx(found.wall_seconds) and found.lost_seconds[HANGING] == silent


def test_what_an_attempt_does_again_is_lost_before_it_has_done_it() -> None:
    found = goodput([FIRST], {1: {"silent_seconds": 30.0}}, RECORDS[:4], counts_to=2)
    assert found is not None and found.lost_steps == {1: 2} and found.effective_seconds == pytest.approx(2 * 1.5)
    metrics = found.metrics()
    assert metrics["goodput/ratio"] == pytest.approx(3 / 50) and metrics["goodput/lost_steps"] == 2
    assert metrics["goodput/lost_seconds/until_a_hang_was_noticed"] == 30


def test_what_is_unknown_is_not_guessed() -> None:
    assert goodput([Attempt(1, "died")], {}, RECORDS) is None
    assert goodput([], {}, []) is None


def test_a_clock_that_was_set_back_takes_no_time_from_what_was_measured() -> None:
    """The attempt ends before it began, by its times."""
    found = goodput([replace(SECOND, started=500.0)], {}, RECORDS[6:])
    assert found is not None and found.effective_seconds == found.wall_seconds == 6.0 and found.ratio == 1.0
    assert sum(found.lost_seconds.values()) == 0.0


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_clock_that_was_set_forward_adds_no_time(by_itself: bool) -> None:
    """By a year after the first step, as when a time service corrects a clock without a battery. What an attempt saw
    of it counts where it did not measure itself to its end."""
    year = 365 * 86400.0
    records = [step(1, 1, 112.0, 2.0), *(step(1, n, 110.0 + 2.0 * n + year, 2.0) for n in (2, 3))]
    first = Attempt(1, "died", started=100.0, ended=118.0 + year, clock_jumped=year)
    if by_itself:
        first = replace(first, outcome="finished", exit_code=0, measured=18.0, clock_jumped=0.0)
    found = goodput([first], {}, records)
    assert found is not None and found.wall_seconds == pytest.approx(18.0) and first.seconds == pytest.approx(18.0)
    assert found.effective_seconds == 6.0 and found.lost_seconds[START] == 10.0
    total = found.effective_seconds + sum(found.lost_seconds.values())
    assert total == pytest.approx(found.wall_seconds)

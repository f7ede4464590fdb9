"""What follows from the way an attempt ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest

from headway.config.sections.supervise import SuperviseConfig
from headway.run.supervisor import supervisor
from headway.run.supervisor.restart_policy import AttemptOutcome, RestartPolicy, frames_of, frames_of_dump

KILLED = AttemptOutcome("died", "worker 0 died (signal 9)", 1, rank=0, step=4, signal=9)
CRASHED = AttemptOutcome("error", "worker 0 crashed", 1, rank=0, step=4, error="ValueError", frames=("a.py:1 f",))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_are_limited_within_a_window_only() -> None:
    clock = Clock()
    policy = RestartPolicy(SuperviseConfig(max_failures=2), clock)
    assert [policy.decide(KILLED, step).continues for step in (1, 2, 3)] == [True, True, False]
    clock.now = 3601.0
    again = policy.decide(KILLED, 4)
    assert again.continues and again.why == "failure 1 of 2 within 1 h 0 m"


def test_preemptions_are_not_limited_and_signals_from_outside_are_no_failures() -> None:
    preempted = AttemptOutcome("preempted", "stopped by SIGTERM; step 4 is saved", 75)
    assert not RestartPolicy(SuperviseConfig()).decide(preempted, 1).continues
    policy = RestartPolicy(SuperviseConfig(max_failures=1, restart_preempted=True))
    ended = replace(KILLED, signal=15)
    assert all(policy.decide(ending, step).continues for step in range(10) for ending in (preempted, ended))
    assert policy.decide(KILLED, 11).continues, "nothing of that has been counted"


def test_a_machine_on_which_nothing_can_be_saved_is_not_tried_again() -> None:
    unsaved = AttemptOutcome("preempted", "10 saves in a row have failed", 75, error="SavesFailed")
    assert not RestartPolicy(SuperviseConfig(restart_preempted=True)).decide(unsaved, 4).continues


def test_a_budget_that_is_reached_ends_the_run() -> None:
    """Even where preemptions do not: what is saved would only be paid for again."""
    reached = AttemptOutcome("budget", "stopped by budget; step 4 is saved", 6)
    decision = RestartPolicy(SuperviseConfig(restart_preempted=True)).decide(reached, 1)
    assert (decision.continues, decision.why) == (False, "the budget is reached")
    assert reached.is_final, "a run with fewer workers would spend, too"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6])
def test_what_would_happen_again_is_not_tried_again(code: int) -> None:
    assert not RestartPolicy(SuperviseConfig()).decide(AttemptOutcome("error", "no", code), 1).continues


@pytest.mark.parametrize("kind", ["error", "hung"])
def test_the_same_fault_twice_is_a_bug(kind: Literal["error", "hung"]) -> None:
    fault = replace(CRASHED, kind=kind)
    others = [replace(fault, step=5), replace(fault, frames=("a.py:2 f",)), replace(fault, error="KeyError"), KILLED]
    policy = RestartPolicy(SuperviseConfig(max_failures=100))
    assert all(policy.decide(ending, 1).continues for ending in (fault, *others, KILLED))
    decision = policy.decide(fault, 1)
    assert not decision.continues and "bug" in decision.why


@pytest.mark.parametrize("first", [-1, 2])
def test_delays_grow_until_there_is_progress(first: int) -> None:
    """Also in a run that has no checkpoint yet."""
    policy = RestartPolicy(SuperviseConfig(max_failures=100, max_delay_seconds=5.0))
    delays = [policy.decide(KILLED, step).delay_seconds for step in (*[first] * 5, 4, 4)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 5.0, 0.0, 1.0]


def test_frames_are_ours_and_the_users() -> None:
    def feed() -> Iterator[int]:
        import json

        json.loads("{")
        yield 1

    with pytest.raises(ValueError) as caught:
        next(feed())
    frames = frames_of(caught.value)
    assert [frame.split()[-1] for frame in frames] == ["test_frames_are_ours_and_the_users", "feed"]
    assert not any("json" in frame.split(":")[0] for frame in frames)


DUMP = f"""Thread 0x01 (most recent call first):
  File "{__file__}", line 7 in idle

Current thread 0x02 (most recent call first):
  File "{__file__}", line 3 in hang
  File "{__file__}", line 2 in step
  File "{supervisor.__file__}", line 1 in run
"""


def test_frames_of_a_dump_are_those_of_the_thread_at_work_without_the_supervisors() -> None:
    assert frames_of_dump(DUMP) == (f"{__file__}:2 step", f"{__file__}:3 hang")
    assert frames_of_dump("") == ()

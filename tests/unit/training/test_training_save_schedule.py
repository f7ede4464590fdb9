"""How often `checkpoint.every: auto` saves."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from headway.checkpoint.save.outcomes import Outcome
from headway.core.errors import CheckpointError
from headway.training.save_schedule import (
    DAY_SECONDS,
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    ChosenInterval,
    FailureRate,
    SaveSchedule,
    daly_interval,
    failure_rate,
)


def expected_waste(interval: float, cost: float, mean: float) -> float:
    """Daly 2006, equation 20 without restart costs: time to solution relative to the solution time itself."""
    return mean * math.expm1((interval + cost) / mean) / interval


@pytest.mark.parametrize(("cost", "mean"), [(0.05, 3600.0), (5.0, 3600.0), (60.0, 1800.0), (200.0, 1000.0)])
def test_no_other_interval_costs_less(cost: float, mean: float) -> None:
    best = daly_interval(cost, mean)
    at_best = expected_waste(best, cost, mean)
    others = [expected_waste(best * factor, cost, mean) for factor in (0.5, 0.8, 1.25, 2.0)]
    assert all(at_best < other for other in others)
    assert daly_interval(cost, mean) == pytest.approx(math.sqrt(2 * cost * mean), rel=0.5)


def test_a_save_that_costs_more_than_failures_leave() -> None:
    assert daly_interval(100.0, 40.0) == 40.0
    assert daly_interval(79.999, 40.0) == pytest.approx(40.0 * 8 / 9, rel=1e-4), "2 (1 + 1/3 + 1/9) M - 2 M"


def test_the_choice_is_said_once_and_stays_within_limits(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ChosenInterval(FailureRate(1.0, "checkpoint.failures_per_day"))
    assert chosen.after_save(0.05) == pytest.approx(daly_interval(0.05, DAY_SECONDS))
    chosen.after_save(0.06)
    said = capsys.readouterr().err
    assert said.count("saving every") == 1 and "0.05 s, with 1 failures a day (checkpoint.failures_per_day)" in said
    assert ChosenInterval(FailureRate(1e-6, "")).after_save(1.0) == LONGEST_SECONDS
    assert ChosenInterval(FailureRate(1e6, "")).after_save(0.001) == SHORTEST_SECONDS
    # Whatever failures cost, saving never takes more than half a percent.
    assert ChosenInterval(FailureRate(1e6, "")).after_save(30.0) == pytest.approx(6000)


def test_where_failures_come_often_the_first_save_does_not_wait_long() -> None:
    assert ChosenInterval(FailureRate(1.0, "")).seconds == 60.0
    assert ChosenInterval(FailureRate(720.0, "")).seconds == pytest.approx(6.0), "of two minutes from one to the next"
    assert ChosenInterval(FailureRate(1e6, "")).seconds == SHORTEST_SECONDS


def test_writing_beside_training_takes_a_tenth_of_the_time_at_most() -> None:
    chosen = ChosenInterval(FailureRate(720.0, ""))
    assert chosen.after_write(3.0) == pytest.approx(6.0), "of what was saved by others there is no cost yet"
    assert chosen.after_save(0.001) == pytest.approx(30.0)
    for _ in range(5):
        shorter = chosen.after_write(0.1)
    assert shorter == SHORTEST_SECONDS


def test_a_save_that_failed_does_not_tell_how_long_one_takes() -> None:
    chosen = ChosenInterval(FailureRate(720.0, ""))
    clock = SaveSchedule("auto", chosen)
    chosen.after_save(0.001)
    clock.written(Outcome(1, 3.0))
    for step in range(2, 7):
        clock.written(Outcome(step, error=CheckpointError("the disk is full")))
    assert chosen.seconds == pytest.approx(30.0)


def test_one_slow_save_does_not_change_the_interval() -> None:
    chosen = ChosenInterval(FailureRate(1.0, ""))
    usual = [chosen.after_save(0.05) for _ in range(3)][-1]
    assert chosen.after_save(5.0) == usual
    assert [chosen.after_save(5.0) for _ in range(3)][-1] > usual, "but a lasting change does"


def test_failures_are_counted_in_the_attempts_of_the_run(tmp_path: Path) -> None:
    assert failure_rate(tmp_path, 3.0).per_day == 3.0
    assert failure_rate(tmp_path, None).per_day == 1.0 and "none seen" in failure_rate(tmp_path, None).source
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    ends = [("died", None), ("crashed", 1), ("preempted", 75), ("mistake", 2), ("interrupted", 130), ("finished", 0)]
    for number, (outcome, code) in enumerate(ends, start=1):
        folder = tmp_path / "attempts" / f"{number:03d}"
        folder.mkdir(parents=True)
        record = {"number": number, "started": 1e9, "ended": 1e9 + DAY_SECONDS / 6, "outcome": outcome}
        (folder / "attempt.json").write_text(json.dumps({**record, "exit_code": code}))
    found = failure_rate(tmp_path, None)
    assert found.per_day == pytest.approx((2 + 1) / (1 + 1)) and "2 unplanned ends in 1 d 0 h" in found.source


@pytest.mark.parametrize("way", [1.0, -1.0])
def test_a_clock_that_was_set_changes_no_failure_rate(tmp_path: Path, way: float) -> None:
    """By 30 years, in an attempt that measured itself, and in one that died after it had seen it."""
    jump = way * 30 * 365 * DAY_SECONDS
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    ends = [{"ended": 1e9 + 60 + jump, "seconds": DAY_SECONDS / 2, "outcome": "crashed"}, {"outcome": "died"}]
    for number, end in enumerate(ends, start=1):
        folder = tmp_path / "attempts" / f"{number:03d}"
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"number": number, "started": 1e9, **end}))
    line = {"attempt": 2, "step": 1, "time": 1e9 + jump + DAY_SECONDS / 2, "health/clock_jump_seconds": jump}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert failure_rate(tmp_path, None).per_day == pytest.approx((2 + 1) / (1 + 1))


@pytest.mark.parametrize("ended", [math.inf, 10**400])
def test_a_time_that_is_none_is_no_time(tmp_path: Path, ended: float) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    folder = tmp_path / "attempts" / "001"
    folder.mkdir(parents=True)
    record = {"number": 1, "started": 1e9, "ended": ended, "outcome": "crashed"}
    (folder / "attempt.json").write_text(json.dumps(record))
    assert ChosenInterval(failure_rate(tmp_path, None)).seconds == 60.0


def test_the_clock_asks_only_where_an_interval_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("headway.training.save_schedule.time.monotonic", lambda: now[0])
    silent, speaking = SaveSchedule("auto"), SaveSchedule("auto", ChosenInterval(FailureRate(1.0, "")))
    now[0] = 59.0
    assert not silent.due() and not speaking.due()
    now[0] = 60.0
    assert not silent.due() and speaking.due()
    with speaking.saving():
        now[0] += 0.5
    now[0] += daly_interval(0.5, DAY_SECONDS) - 1
    assert not speaking.due()
    now[0] += 1.1
    assert speaking.due()

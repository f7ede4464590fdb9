"""Anomalies: each fires with its cause, and stays silent where a run is healthy, tiny, or changed on purpose."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headway.telemetry.anomalies import AnomalyWatch, Episode, Episodes
from headway.telemetry.anomaly import (
    _ADVICE,
    DATA_WAIT,
    GPU_MEMORY,
    HEAT,
    NOT_FINITE,
    OTHER_PROCESSES,
    OWN_MEMORY,
    QUOTA,
    RESTART,
    ROWS,
    UNKNOWN,
    UNSTABLE,
    VIRTUAL_MACHINES,
)

Change = Callable[[int], dict[str, Any]]
LATE = 120


def records(
    steps: int, change: Change = lambda step: {}, *, seconds: float = 6.0, noise: float = 0.05, attempts: int = 1
) -> Iterator[dict[str, Any]]:
    """Records of a run: a step of six seconds, ten of which are a stretch, and what changes it by the step."""
    chance, now = random.Random(3), 1000.0
    for step in range(1, steps + 1):
        record = {
            "step": step,
            "attempt": 1 + (step - 1) * attempts // steps,
            "train/loss": 3.0,
            "train/items": 4096.0,
            "train/skipped_steps": 0.0,
            "speed/step_seconds": seconds * (1 + noise * chance.uniform(-1, 1)),
            "speed/data_wait_share": 0.01,
            "memory/peak_gib": 40.0,
            "health/loss_deviations": chance.gauss(0, 1.5),
            "health/grad_norm_deviations": chance.gauss(0, 1.5),
        }
        if step % 10 == 0:
            record |= {
                "health/memory_available_gib": 100.0 + chance.uniform(-1, 1),
                "health/cpu_wait_share": 0.02,
                "health/cpu_used_by_others": 0.1,
                "health/cpu_stolen_share": 0.0,
                "health/cpu_throttled_share": 0.0,
                "health/gpu_temperature_celsius": 60.0,
            }
        record |= {name: value for name, value in change(step).items() if name in record or step % 10}
        now += record["speed/step_seconds"]
        yield {**record, "time": now}


def found(lines: Iterator[dict[str, Any]], *, on_gpu: bool = True) -> list[tuple[str, str]]:
    """Kind and cause of what is found after the last record."""
    watch = AnomalyWatch()
    watch.stretches.on_gpu = on_gpu
    for record in lines:
        watch.add(record["step"], record["attempt"], record)
    return [(one.kind, one.cause) for one in watch.found()]


def late(**values: float) -> Change:
    return lambda step: values if step > LATE else {}


SLOW = {"speed/step_seconds": 8.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (late(**SLOW), ("slower", UNKNOWN)),
        (late(**SLOW, **{"speed/data_wait_share": 0.19}), ("data wait", UNKNOWN)),
        (late(**SLOW, **{"health/cpu_wait_share": 0.3, "health/cpu_used_by_others": 1.5}), ("slower", OTHER_PROCESSES)),
        (late(**SLOW, **{"health/cpu_throttled_share": 0.2}), ("slower", QUOTA)),
        (late(**SLOW, **{"health/cpu_stolen_share": 0.2}), ("slower", VIRTUAL_MACHINES)),
        (late(**SLOW, **{"health/gpu_temperature_celsius": 88.0}), ("slower", HEAT)),
        # Less than a tenth of the time, but most of what is lost.
        (late(**{"speed/step_seconds": 7.15, "speed/data_wait_share": 0.0995}), ("slower", DATA_WAIT)),
        (late(**{"speed/data_wait_share": 0.25}), ("data wait", UNKNOWN)),
        (lambda step: {"speed/data_wait_share": 0.3}, ("data wait", UNKNOWN)),  # from the beginning
        (lambda step: {"memory/peak_gib": 40.0 + 0.02 * step}, ("memory growth", GPU_MEMORY)),
        (
            lambda step: {"speed/step_seconds": 3.0 if step % 2 else 9.0} if step > LATE else {},
            ("uneven steps", UNKNOWN),
        ),
    ],
)
def test_a_drift_is_found_with_its_cause(change: Change, expected: tuple[str, str]) -> None:
    assert found(records(LATE + 60, change)) == [expected]


def test_a_slow_restart_is_suspected_by_its_attempt() -> None:
    assert found(records(240, late(**SLOW), attempts=2)) == [("slower", RESTART)]
    assert not found(records(240, attempts=2))


@pytest.mark.parametrize(
    ("growth", "available", "expected"),
    [
        (0.02, -0.2, [("memory growth", OWN_MEMORY)]),
        (0.0, -0.2, [("memory growth", OTHER_PROCESSES)]),
        (0.02, 0.0, []),  # files that are mapped count to a process, and can be dropped at any time
    ],
)
def test_main_memory_that_runs_out(growth: float, available: float, expected: list[tuple[str, str]]) -> None:
    def change(step: int) -> dict[str, float]:
        grown = {"memory/peak_gib": 40.0 + growth * step}
        return grown | ({"health/memory_available_gib": 100.0 + available * step} if step % 10 == 0 else {})

    assert found(records(180, change), on_gpu=False) == expected


def test_how_long_memory_will_last() -> None:
    """A hundred GiB of which 0.2 go every six seconds last fifty minutes from the first reading on."""
    watch = AnomalyWatch()
    change = {"noise": 0.0}
    lines = records(
        175, lambda step: {"health/memory_available_gib": 100 - 0.2 * step} if step % 10 == 0 else {}, **change
    )
    for record in lines:
        watch.add(record["step"], record["attempt"], record)
    [anomaly] = watch.found()
    left = (100 - 0.2 * 170) / (0.2 / 6.0)
    assert f"none is left in {left // 60:.0f} m" in anomaly.text


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {},
        late(**{"speed/step_seconds": 6.6}),  # a tenth longer
        lambda step: {"memory/peak_gib": 50.0 - 10.0 / (1 + step / 10)},  # an allocator that fills up
        lambda step: {"memory/peak_gib": 41.0 if step > LATE else 40.0},  # once
        lambda step: SLOW if 60 < step <= 90 else {},  # over
        lambda step: SLOW if step > LATE + 45 else {},  # too short to tell
        # A batch ramp: twice the items take twice the time.
        late(**{"train/items": 8192.0, "speed/step_seconds": 12.0}),
        late(**{"health/cpu_wait_share": 0.3, "health/cpu_used_by_others": 1.5}),  # without an effect
    ],
)
def test_a_healthy_run_is_left_in_peace(change: Change) -> None:
    assert found(records(LATE + 60, change)) == []


@pytest.mark.parametrize("noise", [0.3, 0.9])
def test_a_run_that_was_always_uneven_is_left_in_peace(noise: float) -> None:
    assert found(records(400, noise=noise)) == []


def test_a_tiny_run_is_left_in_peace() -> None:
    """Three hundred steps of 20 to 400 ms, slower and slower, with little to do."""
    assert found(records(300, lambda step: {"speed/step_seconds": 0.02 + step / 1500}, noise=0.9)) == []
    assert found(records(300, lambda step: {"speed/data_wait_share": 0.5}, seconds=0.2)) == []
    # Its steps are milliseconds; the times of such steps vary with everything that a machine does.
    jitter = lambda step: {"speed/step_seconds": 0.002 if step % 50 else 0.05}  # noqa: E731
    assert found(records(40_000, lambda step: jitter(step) if step > 20_000 else {}, seconds=0.003)) == []


#: Deviations of the loss and of the gradient norm by step; those of other steps are usual.
Deviations = dict[int, tuple[float, float]]


def deviating(deviations: Deviations) -> Change:
    def change(step: int) -> dict[str, float]:
        loss, norm = deviations.get(step, (0.5, 0.5))
        return {"health/loss_deviations": loss, "health/grad_norm_deviations": norm}

    return change


@pytest.mark.parametrize(
    ("deviations", "expected"),
    [
        ({100: (9.0, 1.0)}, ("loss spike", UNKNOWN)),  # the newest step: nothing shows why
        ({99: (9.0, 1.0)}, ("loss spike", ROWS)),
        ({99: (9.0, 20.0)}, ("loss spike", ROWS)),  # broken rows have large gradients too
        ({99: (9.0, 20.0), 100: (3.0, 0.0)}, ("loss spike", UNKNOWN)),  # between usual and high
        ({90: (9.0, 20.0)} | dict.fromkeys(range(91, 101), (5.0, 1.0)), ("loss spike", UNSTABLE)),
        ({100: (5.0, 20.0)}, ("gradient spike", UNKNOWN)),
        ({97: (0.0, 20.0), 100: (5.0, 1.0)}, ("gradient spike", UNSTABLE)),
        ({80: (0.0, 17.0), 90: (0.0, 17.0), 100: (0.0, 17.0)}, ("gradient spike", UNKNOWN)),
    ],
)
def test_a_spike_that_matters_is_an_anomaly_for_a_while(deviations: Deviations, expected: tuple[str, str]) -> None:
    run = lambda steps: records(steps, deviating(deviations))  # noqa: E731
    assert found(run(100)) == [expected]
    assert [kind for kind, _ in found(run(145))] == [expected[0]]
    assert found(run(210)) == [], "ten minutes and fifty steps later"
    assert found(run(min(deviations) - 1)) == []


@pytest.mark.parametrize(
    "deviations",
    [
        {90: (0.0, 40.0)},
        {90: (0.0, 17.0), 100: (0.0, 17.0)},
        {90: (0.0, 15.0)},  # not even an event
        {20: (0.0, 17.0), 60: (0.0, 17.0), 100: (0.0, 17.0)},  # too far apart
        {90: (0.0, 17.0), 100: (5.0, 0.0)},  # a loss that moves later has nothing to do with it
    ],
)
def test_a_gradient_spike_that_changed_nothing_is_an_event_and_no_anomaly(deviations: Deviations) -> None:
    assert found(records(100, deviating(deviations))) == []
    spikes = [step for step, (_, norm) in deviations.items() if norm > 16]
    episodes = episodes_of(records(100, deviating(deviations)))
    assert [(one.first_step, one.last_step, one.anomaly.label) for one in episodes] == [
        (step, step, "gradient spike") for step in spikes
    ]


def episodes_of(lines: Iterator[dict[str, Any]]) -> list[Episode]:
    episodes = Episodes(AnomalyWatch())
    for record in lines:
        episodes.add(record)
    return episodes.found()


def test_one_event_is_one_row_with_its_steps() -> None:
    """Each with the cause that later steps show; only steps in a row are one event."""
    deviations = {423: (9.0, 1.0)} | dict.fromkeys(range(500, 504), (9.0, 20.0)) | {505: (10.0, 1.0)}
    rows = [
        (one.first_step, one.last_step, one.anomaly.cause, one.anomaly.text)
        for one in episodes_of(records(1500, deviating(deviations)))
    ]
    assert rows == [
        (423, 423, ROWS, "the loss was 9.0 deviations above the usual"),
        (500, 503, ROWS, "the loss was 9.0 deviations above the usual"),
        (505, 505, ROWS, "the loss was 10.0 deviations above the usual"),
    ]


def test_a_spike_whose_update_is_skipped_is_one_event() -> None:
    values = {"health/loss_deviations": 9.0, "health/grad_norm_deviations": 1.0}
    change = lambda step: {"train/skipped_steps": float(step >= 90)} | (values if step == 90 else {})  # noqa: E731
    [row] = episodes_of(records(100, change))
    assert (row.first_step, row.anomaly.label) == (90, "loss spike: rows")
    assert row.anomaly.text == "the loss was 9.0 deviations above the usual; its update was skipped"


@pytest.mark.parametrize("kept", [100, 95])
def test_a_rollback_is_an_anomaly_for_a_while(kept: int) -> None:
    """After step 101 the run goes back; its only record of the step that is then left out has no other value."""
    lines = list(records(220))
    left_out = {"step": 101, "attempt": 1, "time": lines[100]["time"], "train/left_out_steps": 1.0}
    run = lambda steps: iter([*lines[:101], *lines[kept:100], left_out, *lines[101:steps]])  # noqa: E731
    assert found(run(101)) == found(run(140)) == [("rollback", UNKNOWN)], "no record tells the reason"
    assert found(run(210)) == [], "ten minutes and fifty steps later"
    assert found(iter(lines[:101])) == []
    # Another attempt passes over the same step: no news.
    resumed = [{**one, "attempt": 2} for one in (*lines[kept:100], left_out, *lines[101:110])]
    assert found(iter([*lines[:101], *resumed])) == []


def test_the_limit_of_a_spike_is_that_of_the_config() -> None:
    watch = AnomalyWatch()
    watch.spike_deviations = 12.0
    for record in records(20, lambda step: {"health/loss_deviations": 10.0}):
        watch.add(record["step"], record["attempt"], record)
    assert not watch.found()


def test_skipped_steps() -> None:
    """One is an event; it is an anomaly if the loss was not finite, or if it repeats."""
    one = lambda step: {"train/skipped_steps": float(step >= 50)}  # noqa: E731
    assert found(records(60, one)) == []
    assert [(row.first_step, row.anomaly.label) for row in episodes_of(records(60, one))] == [(50, "skipped steps")]
    not_finite = lambda step: one(step) | ({"train/loss": "NaN"} if step == 50 else {})  # noqa: E731
    assert found(records(60, not_finite)) == [("skipped steps", NOT_FINITE)]
    several = lambda step: {"train/skipped_steps": float((step >= 50) + (step >= 55) + (step >= 60))}  # noqa: E731
    assert found(records(60, several)) == [("skipped steps", UNKNOWN)]
    # How fp16 finds its loss scale is no trouble; a loss scale that falls without end is.
    assert found(dict(record, **{"train/loss_scale": 1024.0}) for record in records(60, one)) == []
    many = lambda step: {"train/skipped_steps": float(max(0, step - 50)), "train/loss": "Infinity"}  # noqa: E731
    lines = (dict(record, **{"train/loss_scale": 2.0}) for record in records(60, many))
    assert found(lines) == [("skipped steps", NOT_FINITE)]
    # A count of an earlier attempt is no news.
    assert found(records(60, lambda step: {"train/skipped_steps": 7.0})) == []


def test_damaged_records_hurt_nothing() -> None:
    odd = ({"speed/step_seconds": value, "time": "x", "train/items": None} for value in ("NaN", -1.0, 0.0, None, 1e999))
    assert found({"step": step, "attempt": 1, **one} for step, one in enumerate(odd)) == []
    for name in ("speed/step_seconds", "train/items", "memory/peak_gib", "speed/data_wait_share", "time"):
        for value in (1e200, -1e308, 1e308, 1e-320):
            found(records(200, late(**{name: value})))
            found(({**one, name: value} for one in records(200)), on_gpu=False)
    nothing = [{"step": step, "attempt": 1, "speed/step_seconds": 0.0} for step in range(1000)]
    assert found(iter(nothing)) == []


def test_episodes_of_a_whole_history() -> None:
    lines = list(records(400, lambda step: SLOW if 150 < step <= 240 else {}))
    episodes = Episodes(AnomalyWatch())
    for record in [{"step": "x"}, *lines, {"step": 5, "attempt": 0, "train/loss": 1.0}]:
        episodes.add(record)
    [episode] = episodes.found()
    assert (episode.anomaly.kind, episode.anomaly.cause) == ("slower", UNKNOWN)
    assert 150 < episode.first_step < 200 and 240 <= episode.last_step < 290
    assert re.match(r"a step takes (8|8.\d+|7.9\d) s, (6|5.\d+) s were usual", episode.anomaly.text)


def test_every_cause_has_advice() -> None:
    causes = {DATA_WAIT, RESTART, UNKNOWN, OTHER_PROCESSES, QUOTA, VIRTUAL_MACHINES, HEAT}
    assert set(_ADVICE) == causes | {ROWS, UNSTABLE, NOT_FINITE, GPU_MEMORY, OWN_MEMORY}

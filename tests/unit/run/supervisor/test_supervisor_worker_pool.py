"""How many workers a run has: fewer after one was lost for good, all again later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.config import Config, resolve
from headway.core.errors import ConfigError
from headway.run.supervisor.restart_policy import AttemptOutcome
from headway.run.supervisor.worker_pool import WorkerPool, allowed_sizes

DIED = AttemptOutcome("died", "worker 2 died (signal 9)", 1, rank=2, step=7, signal=9)


def config(workers: Any, determinism: str = "elastic", **train: Any) -> Config:
    values = {
        "determinism": determinism,
        "parallel": {"workers": workers},
        "train": {"steps": 10, "sequence_length": 32, "global_batch": 8, "micro_batch": 1, **train},
        "model": {"preset": "4m"},
        "supervise": {"grow_after": "60 s"},
    }
    return Config.model_validate(values)


def test_sizes_are_those_that_share_the_lanes() -> None:
    assert list(allowed_sizes(config("1:8"))) == [1, 2, 4, 8]
    assert list(allowed_sizes(config("3:8"))) == [4, 8]
    assert list(allowed_sizes(config(8))) == [8]


@pytest.mark.parametrize(
    ("workers", "determinism", "message"),
    [("1:4", "run", "determinism 'run' holds for one number"), ("3:4", "elastic", "from 3 to 3 fits")],
)
def test_what_cannot_be_kept_is_refused(workers: str, determinism: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(workers, determinism))
    assert resolve(config("1:4", "off")).parallel.min_workers == 1
    with pytest.raises(ValueError, match="more than workers"):
        config("4:2")


def test_a_worker_that_fails_twice_without_progress_is_left_out() -> None:
    now = [0.0]
    crew = WorkerPool(config("1:8"), "3,4,5,6,7,8,9,10", lambda: now[0])
    assert not crew.shrink(DIED, 4)
    assert not crew.shrink(DIED, 5), "there was progress"
    assert not crew.shrink(replace(DIED, rank=1), 5), "it was another one"
    assert not crew.shrink(DIED, 5)
    assert crew.devices is None
    assert crew.shrink(DIED, 5) == "worker 2 is lost for good; the run continues with 4 workers"
    assert (crew.size, crew.devices) == (4, "3,4,6,7,8,9,10")
    assert not crew.may_grow
    now[0] = 60.0
    assert crew.may_grow


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def grown(now: list[float]) -> WorkerPool:
    """All workers again, at 60 s, from step 6."""
    crew = WorkerPool(config("1:8"), "3,4,5,6,7,8,9,10", lambda: now[0])
    assert [bool(crew.shrink(DIED, 5)) for _ in range(2)] == [False, True]
    now[0] = 60.0
    assert crew.may_grow
    crew.grow(6)
    assert (crew.size, crew.devices, crew.may_grow) == (8, None, False)
    return crew


@pytest.mark.parametrize("ending", [DIED, replace(DIED, rank=None), replace(DIED, rank=0), replace(DIED, kind="slow")])
def test_all_workers_in_vain_are_as_few_as_before_and_tried_half_as_often(
    grown: WorkerPool, now: list[float], ending: AttemptOutcome
) -> None:
    for wait in (120.0, 240.0):
        assert grown.shrink(ending, 6) == "8 workers were tried again in vain; the run continues with 4 workers"
        assert (grown.size, grown.devices) == (4, "3,4,6,7,8,9,10")
        now[0] += wait - 1.0
        assert not grown.may_grow
        now[0] += 1.0
        assert grown.may_grow
        grown.grow(6)


def test_after_all_workers_got_on_the_next_loss_is_as_the_first(grown: WorkerPool, now: list[float]) -> None:
    assert grown.shrink(DIED, 6) is not None
    now[0] += 120.0
    grown.grow(6)
    assert [bool(grown.shrink(DIED, 7)) for _ in range(2)] == [False, True], "there was progress"
    now[0] += 59.0
    assert not grown.may_grow
    now[0] += 1.0
    assert grown.may_grow


@pytest.mark.parametrize(
    "ending",
    [
        replace(DIED, signal=15),
        replace(DIED, kind="error", exit_code=3),
        AttemptOutcome("preempted", "stopped", 75),
        AttemptOutcome("finished", "finished", 0),
    ],
)
def test_what_says_nothing_of_workers_takes_none_away(grown: WorkerPool, ending: AttemptOutcome) -> None:
    assert grown.shrink(ending, 6) is None and grown.size == 8
    assert grown.shrink(DIED, 6) is not None, "they have still to show that they get on"


def test_without_a_range_nobody_is_left_out() -> None:
    crew = WorkerPool(config(8))
    assert [crew.shrink(DIED, 5) for _ in range(4)] == [None] * 4 and crew.size == 8


@pytest.mark.parametrize("hidden", ["", "-1"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_that_was_to_see_no_gpu_sees_none_with_fewer_workers_either(hidden: str, rank: int) -> None:
    crew, died = WorkerPool(config("1:8"), hidden), replace(DIED, rank=rank)
    assert not crew.shrink(died, 4)
    assert crew.shrink(died, 4)
    assert crew.devices in (None, "")

"""How many workers a run has: fewer after one was lost for good, all again later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.config import Config
from headway.core.errors import ConfigError
from headway.supervise.crew import Crew, allowed_sizes
from headway.supervise.endings import Ending

DIED = Ending("died", "worker 2 died (signal 9)", 1, rank=2, step=7, signal=9)


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
        config(workers, determinism).resolved()
    assert config("1:4", "off").resolved().parallel.min_workers == 1
    with pytest.raises(ValueError, match="more than workers"):
        config("4:2")


def test_a_worker_that_fails_twice_without_progress_is_left_out() -> None:
    now = [0.0]
    crew = Crew(config("1:8"), "3,4,5,6,7,8,9,10", lambda: now[0])
    assert not crew.lose(DIED, 4)
    assert not crew.lose(DIED, 5), "there was progress"
    assert not crew.lose(replace(DIED, rank=1), 5), "it was another one"
    assert not crew.lose(DIED, 5)
    assert crew.devices is None
    assert crew.lose(DIED, 5)
    assert (crew.size, crew.devices) == (4, "3,4,6,7,8,9,10")
    assert not crew.may_grow
    now[0] = 60.0
    assert crew.may_grow
    crew.grow()
    assert (crew.size, crew.devices, crew.may_grow) == (8, None, False)
    assert [crew.lose(DIED, 6) for _ in range(2)] == [False, True]
    now[0] = 120.0
    assert not crew.may_grow, "in vain the last time, so it waits twice as long"
    now[0] = 180.0
    assert crew.may_grow


def test_without_a_range_nobody_is_left_out() -> None:
    crew = Crew(config(8))
    assert [crew.lose(DIED, 5) for _ in range(4)] == [False] * 4 and crew.size == 8
    assert Crew(config("1:2")).lose(replace(DIED, kind="preempted"), 1) is False


@pytest.mark.parametrize("hidden", ["", "-1"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_that_was_to_see_no_gpu_sees_none_with_fewer_workers_either(hidden: str, rank: int) -> None:
    crew, died = Crew(config("1:8"), hidden), replace(DIED, rank=rank)
    assert not crew.lose(died, 4)
    assert crew.lose(died, 4)
    assert crew.devices in (None, "")

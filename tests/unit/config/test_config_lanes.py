"""How the rows of a step are cut into lanes and micro-batches, and how many threads compute them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Config, LaneGrid, ParallelConfig, TrainConfig, resolve, resolve_lanes, resolve_threads
from headway.core.errors import ConfigError


def config(determinism: Any = "run", threads: Any = "auto", **train: Any) -> Config:
    parallel = ParallelConfig(threads=threads)
    return Config(determinism=determinism, train=TrainConfig(steps=1, **train), parallel=parallel)


@pytest.mark.parametrize(
    ("given", "workers", "grid"),
    [
        (config(global_batch=32), 1, (1, 4, 8)),
        (config(global_batch=32), 4, (4, 1, 8)),
        (config(global_batch=21), 3, (3, 1, 7)),
        (config(global_batch=22), 2, (2, 11, 1)),
        (config(global_batch=32, micro_batch=2), 2, (2, 8, 2)),
        (config(global_batch=32, lanes=8), 2, (8, 1, 4)),
        (config("off", global_batch=12, lanes=6), 3, (6, 1, 2)),
        (config("elastic", global_batch=32), 1, (8, 1, 4)),
        (config("elastic", global_batch=32), 8, (8, 1, 4)),
        (config("elastic", global_batch=12), 2, (4, 1, 3)),
        (config("elastic", global_batch=7), 1, (1, 1, 7)),
        (config("elastic", global_batch=64, lanes=16), 16, (16, 1, 4)),
        (config("elastic", global_batch="2Ki tokens", sequence_length=128), 1, (8, 1, 2)),
    ],
)
def test_grids(given: Config, workers: int, grid: tuple[int, int, int]) -> None:
    assert resolve_lanes(given, workers) == LaneGrid(*grid)


@pytest.mark.parametrize(
    ("given", "workers", "key", "fix"),
    [
        (config(global_batch=32), 3, "parallel.workers", "parallel.workers=2, or train.global_batch=33"),
        (config(global_batch=32, lanes=5), 1, "train.lanes", "train.lanes=4, or train.global_batch=30"),
        (config(global_batch=32, lanes=8), 3, "parallel.workers", "parallel.workers=2"),
        (config(global_batch=32, lanes=8), 16, "train.lanes", "parallel.workers=8, or train.lanes=16"),
        (config(global_batch=32, lanes=8, micro_batch=8), 1, "train.micro_batch", "train.micro_batch=4"),
        (config("elastic", global_batch=24, lanes=6), 1, "train.lanes", "train.lanes=4"),
        (config("elastic", global_batch=24, lanes=16), 1, "train.lanes", "train.lanes=8, or train.global_batch=32"),
        (config("elastic", global_batch=24), 3, "parallel.workers", "parallel.workers=2"),
        (config("elastic", global_batch=32), 16, "parallel.workers", "parallel.workers=8, or train.lanes=16"),
        (config("elastic", global_batch=24), 16, "parallel.workers", "parallel.workers=8"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_nearest_that_can(
    given: Config, workers: int, key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_lanes(given, workers)
    assert key in str(caught.value.where)
    assert caught.value.fix == fix


@given(
    rows=st.integers(1, 96),
    workers=st.integers(1, 9),
    lanes=st.one_of(st.just("auto"), st.integers(1, 20)),
    determinism=st.sampled_from(["off", "run", "elastic"]),
)
def test_a_grid_has_every_row_once_or_the_advice_helps(rows: int, workers: int, lanes: Any, determinism: str) -> None:
    asked = config(determinism, global_batch=rows, lanes=lanes)
    try:
        grid = resolve_lanes(asked, workers)
    except ConfigError as error:
        for advice in str(error.fix).split(", or "):
            key, value = advice.split("=")
            if key == "parallel.workers":
                workers = int(value)
            else:
                train = asked.train.model_copy(update={key.removeprefix("train."): int(value)})
                asked = asked.model_copy(update={"train": train})
            break
        # One piece of advice is enough, unless something else is wrong too; then that is told.
        try:
            grid = resolve_lanes(asked, workers)
        except ConfigError as second:
            assert second.what != error.what
            return
    assert grid.lanes * grid.micro_batches * grid.micro_batch == rows
    shares = [lane for rank in range(workers) for lane in grid.of_worker(rank, workers)]
    assert shares == list(range(grid.lanes))


def test_workers_of_an_elastic_run_in_shards_compute_neighbouring_lanes_at_the_same_time() -> None:
    asked = Config.model_validate({"determinism": "elastic", "parallel": {"strategy": "zero3"}, "train": {"steps": 1}})
    grid = resolve_lanes(asked, 2)
    assert [list(grid.of_worker(rank, 2)) for rank in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("every", "micro_batch", "fix"),
    [("step", 4, "determinism=run"), ("micro_batch", 1, "train.micro_batch=4"), ("micro_batch", 4, None)],
)
def test_elastic_runs_in_shards_sum_lane_by_lane(every: str, micro_batch: int, fix: str | None) -> None:
    values = {
        "determinism": "elastic",
        "train": {"steps": 1, "global_batch": 8, "lanes": 2, "micro_batch": micro_batch},
        "parallel": {"strategy": "zero3", "reduce_every": every, "workers": 2},
    }
    if fix is None:
        resolve(Config.model_validate(values))
        return
    with pytest.raises(ConfigError) as refused:
        resolve(Config.model_validate(values))
    assert "lane by lane" in refused.value.what and fix in refused.value.fix


def test_large_gradients_are_reduced_in_every_micro_batch() -> None:
    def reduces(every: str, gibibytes: int) -> bool:
        return ParallelConfig.model_validate({"reduce_every": every}).reduces_each_micro_batch(gibibytes * 2**30)

    assert [reduces("auto", size) for size in (1, 3)] == [False, True]
    assert reduces("micro_batch", 1) and not reduces("step", 3)


def test_threads() -> None:
    assert resolve_threads(config(), workers=2, lanes=2, cores=8) == 4
    assert resolve_threads(config("elastic"), workers=2, lanes=8, cores=16) == 2
    assert resolve_threads(config(), workers=4, lanes=4, cores=2) == 1
    assert resolve_threads(config(threads=3), workers=4, lanes=4, cores=2) == 3


@pytest.mark.parametrize(("at_most", "threads"), [(None, 4), (1, 1), (3, 3), (16, 4)])
def test_what_the_user_set_limits_threads(at_most: int | None, threads: int) -> None:
    assert resolve_threads(config(), workers=2, lanes=2, cores=8, at_most=at_most) == threads
    assert resolve_threads(config(threads=7), workers=2, lanes=2, cores=8, at_most=at_most) == 7


def test_threads_of_an_elastic_run_do_not_depend_on_the_number_of_workers() -> None:
    assert len({resolve_threads(config("elastic"), workers, 8, 32) for workers in (1, 2, 4, 8)}) == 1

"""The cut of a lane into micro-batches, for `train.micro_batch: auto`."""

from __future__ import annotations

from dataclasses import replace

from headway.checkpoint.store import CheckpointInfo
from headway.config import Config, LaneGrid, resolve_threads
from headway.config.derived.lanes import divisors
from headway.core.console import notice
from headway.core.coordination.launched import most_threads, workers_of_this_machine
from headway.core.errors import ConfigError
from headway.core.machine.cores import usable_cores
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.training.setup.trial import (
    exchanges_in_trial,
    largest_micro_batch,
    largest_that_fits,
    memory_limit_bytes,
    trial_step,
)
from headway.training.state import TrainState
from headway.training.task import Task


def common_threads(config: Config, world: World, grid: LaneGrid) -> int:
    """Return the CPU threads of each worker: the smallest number over all machines.

    Bits can depend on it, and a checkpoint stores one number. All workers must call it.
    """
    workers = workers_of_this_machine(world.size)
    threads = resolve_threads(config, workers, grid.lanes, usable_cores(), at_most=most_threads())
    return int(min(worker[0] for worker in world.gather([float(threads)])))


def choose_micro_batch(
    config: Config,
    task: Task,
    state: TrainState,
    strategy: Strategy,
    world: World,
    *,
    grid: LaneGrid,
    start: CheckpointInfo | None,
) -> LaneGrid:
    """Return the grid to train with; with `train.micro_batch=auto`, replace the task's feeds to match.

    Rows of a step, and their distribution over lanes, do not change. Bits depend on the cut, so a resumed run keeps its
    own, unless its lanes have changed or nothing was promised.

    Raises:
        ConfigError: not even the smallest fits, or the task cannot be cut in another way.
    """
    step, last = state.cursor.step, config.train.steps
    assert last is not None, "the config is resolved"
    if config.train.micro_batch != "auto" or step >= last:
        return grid
    lane = grid.of_worker(world.data_rank, world.mesh.data)[0]
    recut, lane_rows = task.recut, config.train.batches.common_rows // grid.lanes
    if recut is None:
        raise ConfigError(
            "this task has micro-batches of one size only", where="train.micro_batch", fix="give it a number"
        )

    def cut(rows: int) -> LaneGrid:
        return replace(grid, micro_batches=grid.micro_batches * grid.micro_batch // rows, micro_batch=rows)

    def attempt(rows: int) -> None:
        feed, _ = recut(cut(rows))
        trial_step(config, task, state, strategy, world, batch=largest_micro_batch(feed, lane, step, last))

    before = start.context.get("micro_batch") if start and config.determinism != "off" else None
    if isinstance(before, int) and lane_rows % before == 0:
        rows, how = before, "as before"
    else:
        choices = divisors(lane_rows)
        again = world.size == 1 or (world.mesh.is_data_parallel and not exchanges_in_trial(config, world))
        rows = largest_that_fits(choices, attempt, state, world, memory_limit_bytes(world), again=again)
        how = "the most that fits"
    notice(f"micro-batches of {rows} row{'s' if rows > 1 else ''}, {how}; {cut(rows).micro_batches} per lane and step")
    task.feed, task.evaluation = recut(cut(rows))
    return cut(rows)

"""What is decided by this machine before the first step: threads, micro-batches (`train.micro_batch: auto`)."""

from __future__ import annotations

from dataclasses import replace

from headway.checkpoint.store import CheckpointInfo
from headway.config import Config, LaneGrid, resolve_threads
from headway.config.derived.lanes import divisors
from headway.core.console import notice, warning
from headway.core.coordination.launched import most_threads, workers_of_this_machine
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.core.machine.cores import usable_cores
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.setup.trial import (
    exchanges_in_trial,
    largest_micro_batch,
    largest_that_fits,
    memory_limit_bytes,
    trial_step,
)


def common_threads(config: Config, world: World, grid: LaneGrid) -> int:
    """Return the CPU threads of each worker: the smallest number over all machines.

    Bits can depend on it, and a checkpoint stores one number. All workers must call it.
    """
    workers = workers_of_this_machine(world.size)
    threads = resolve_threads(config, workers, grid.lanes, usable_cores(), at_most=most_threads())
    return int(min(worker[0] for worker in world.gather([float(threads)])))


def choose_threads(config: Config, world: World, grid: LaneGrid, start: CheckpointInfo | None) -> int:
    """Return the CPU threads of every worker. Bits can depend on them, so a resumed run keeps its number.

    Raises:
        ConfigError: the config wants another number, and `determinism=elastic` rules that out.
    """
    threads = common_threads(config, world, grid)
    context = start.context if start else {}
    mesh = world.mesh.arrangement
    before: int | None = context.get("threads")
    same_layout = config.determinism == "elastic" or (
        context.get("world_size") == world.size and context.get("mesh", mesh) == mesh
    )
    if before is None or before == threads or not same_layout:
        return threads
    if config.parallel.threads == "auto":
        if before > threads:
            notice(f"{before} threads per worker as before, since bits depend on it; {threads} would suit this machine")
        return before
    if config.determinism == "elastic":
        raise ConfigError(
            f"this run computes with {before} threads per worker; its bits would change with {threads}",
            where="parallel.threads",
            fix=f"parallel.threads={before}, or auto",
        )
    if config.determinism == "run":
        warning(f"{threads} threads per worker instead of {before}: the run continues, but not bit for bit")
    return threads


def choose_micro_batch(assembled: Assembled, start: CheckpointInfo | None) -> Assembled:
    """Return what is trained with its final grid; with `train.micro_batch=auto`, replace the task's feeds to match.

    Rows of a step, and their distribution over lanes, do not change. Bits depend on the cut, so a resumed run keeps its
    own, unless its lanes have changed or nothing was promised.

    Raises:
        ConfigError: not even the smallest fits, or the task cannot be cut in another way.
    """
    config = assembled.config
    state = assembled.state
    world = assembled.world
    grid = assembled.grid
    step = state.cursor.step
    last = assembled.total_steps
    if config.train.micro_batch != "auto" or step >= last:
        return assembled
    recut = assembled.task.recut
    lane_rows = config.train.batches.common_rows // grid.lanes
    if recut is None:
        raise ConfigError(
            "this task has micro-batches of one size only", where="train.micro_batch", fix="give it a number"
        )

    def cut(rows: int) -> LaneGrid:
        return replace(grid, micro_batches=grid.micro_batches * grid.micro_batch // rows, micro_batch=rows)

    def attempt(rows: int) -> None:
        feed, _ = recut(cut(rows))
        trial_step(assembled, largest_micro_batch(feed, assembled.lanes[0], step, last))

    before = start.context.get("micro_batch") if start and config.determinism != "off" else None
    if isinstance(before, int) and lane_rows % before == 0:
        rows = before
        how = "as before"
    else:
        choices = divisors(lane_rows)
        exchanges = exchanges_in_trial(config.parallel.strategy, config.determinism, world)
        again = world.size == 1 or (world.mesh.is_data_parallel and not exchanges)
        rows = largest_that_fits(choices, attempt, state, world, memory_limit_bytes(world), again=again)
        how = "the most that fits"
    chosen = cut(rows)
    notice(f"micro-batches of {counted(rows, 'row')}, {how}; {chosen.micro_batches} per lane and step")
    assembled.task.feed, assembled.task.evaluation = recut(chosen)
    return replace(assembled, grid=chosen)


def try_memory(assembled: Assembled) -> None:
    """Try a step where `train.trial_step` asks for it, so that a lack of memory shows before the first one.

    Raises:
        ConfigError: memory ran out.
    """
    world = assembled.world
    by_default = world.device.type == "cuda" and world.mesh.pp == 1
    wanted = assembled.config.train.trial_step
    step = assembled.state.cursor.step
    last = assembled.total_steps
    if (by_default if wanted is None else wanted) and step < last:
        trial_step(assembled, largest_micro_batch(assembled.task.feed, assembled.lanes[0], step, last))

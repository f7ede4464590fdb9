"""Pipeline parallelism: stages per worker, the share of idle time, and why layers or micro-batches do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.config.batches import Batches
from headway.config.derived.lanes import LaneGrid, divisors, nearest
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.sections.parallel import ParallelConfig
    from headway.config.sections.train import TrainConfig


def stages_per_worker(parallel: ParallelConfig) -> int:
    """Return the number of stages per worker of a pipeline: one, or several if they are interleaved."""
    return (parallel.virtual_stages or 2) if parallel.pipeline_schedule == "interleaved" else 1


def idle_share(parallel: ParallelConfig, micro_batches: int) -> float:
    """Return the share of a step in which a worker is idle, if stages take equally long and sending takes no time.

    With p workers, v stages on each and m micro-batches it is (p - 1) / (v m + p - 1): the bubble of Narayanan et al.
    2021, section 2.2, which they give as a share of the time without it, (p - 1) / (v m).
    """
    waiting = parallel.pipeline - 1
    return waiting / (stages_per_worker(parallel) * micro_batches + waiting)


def split_problems(parallel: ParallelConfig, train: TrainConfig, layers: int | None) -> Iterator[ConfigError]:
    """Yield why so many layers cannot be cut into the given stages; None for `layers` skips the checks that need it."""
    if parallel.pipeline == 1:
        return
    each = stages_per_worker(parallel)
    stages = parallel.pipeline * each
    yield from _trial_problems(train)
    if parallel.virtual_stages not in (None, 1) and parallel.pipeline_schedule != "interleaved":
        yield ConfigError(
            f"schedule '{parallel.pipeline_schedule}' has one stage per worker, not {parallel.virtual_stages}",
            where="parallel.virtual_stages, parallel.pipeline_schedule",
            fix="parallel.pipeline_schedule=interleaved, or leave parallel.virtual_stages out",
        )
    if parallel.pipeline_schedule == "interleaved" and each == 1:
        yield ConfigError(
            "there is nothing to interleave with one stage per worker",
            where="parallel.virtual_stages, parallel.pipeline_schedule",
            fix="parallel.pipeline_schedule=1f1b, or parallel.virtual_stages=2",
        )
    if layers and stages > layers:
        yield ConfigError(
            f"{layers} layers cannot be cut into {stages} pipeline stages",
            where="parallel.pipeline, model.layers" + (", parallel.virtual_stages" if each > 1 else ""),
            fix=_fewer_stages(layers, parallel),
        )
    split = parallel.pipeline_split
    if split is None:
        return
    if len(split) != stages:
        yield ConfigError(
            f"the split names {len(split)} stages, but there are {stages}",
            where="parallel.pipeline_split, parallel.pipeline",
            fix=f"give {stages} numbers, or leave parallel.pipeline_split out",
        )
    elif layers and sum(split) != layers:
        last = layers - sum(split[:-1])
        near = [*split[:-1], last] if last > 0 else None
        yield ConfigError(
            f"the split has {sum(split)} layers, but the model has {layers}",
            where="parallel.pipeline_split, model.layers",
            fix=f"parallel.pipeline_split={near}" if near else "leave parallel.pipeline_split out",
        )


def _trial_problems(train: TrainConfig) -> Iterator[ConfigError]:
    """Check for settings that handle micro-batches one by one; a pipeline computes all micro-batches of a lane."""
    for key, yes, instead in (
        ("train.precision", train.precision == "fp16", "bf16"),
        ("train.micro_batch", train.micro_batch == "auto", "1"),
        ("train.trial_step", train.trial_step is True, "false"),
    ):
        if yes:
            yield ConfigError(
                f"a pipeline's schedule computes the micro-batches of a lane together; '{key}' needs them one by one",
                where=f"{key}, parallel.pipeline",
                fix=f"{key}={instead}, or parallel.pipeline=1",
            )


def micro_batch_problem(
    parallel: ParallelConfig, batches: Batches, grid: LaneGrid, micro_batches: int
) -> ConfigError | None:
    """Return why the schedule cannot run so many micro-batches in each lane; None if it can."""
    stages = parallel.pipeline
    schedule = parallel.pipeline_schedule
    if stages == 1 or schedule == "gpipe":
        return None
    if schedule == "1f1b" and micro_batches < stages:
        what = f"fewer than the {stages} pipeline stages"
    elif schedule == "interleaved" and micro_batches % stages:
        what = f"not a multiple of the {stages} pipeline stages"
    else:
        return None
    rows = micro_batches * grid.micro_batch
    fits = [n for n in divisors(rows) if (rows // n >= stages if schedule == "1f1b" else rows // n % stages == 0)]
    multiple = grid.lanes * grid.micro_batch * max(stages, round(micro_batches / stages) * stages)
    key = "train.global_batch" if len(batches.sizes) == 1 else "train.batch_ramp, train.global_batch"
    batch = f"train.global_batch={multiple}" if len(batches.sizes) == 1 else f"a global batch of {multiple} rows there"
    return ConfigError(
        f"schedule '{schedule}' cannot run {micro_batches} micro-batches in each lane, {what}",
        where=f"train.micro_batch, {key}, parallel.pipeline_schedule",
        fix=f"train.micro_batch={nearest(grid.micro_batch, fits)}" if fits else batch,
    )


def _fewer_stages(layers: int, parallel: ParallelConfig) -> str:
    """Return a fix with the largest number of stages that the layers allow."""
    each = stages_per_worker(parallel)
    if each > 1 and parallel.pipeline <= layers:
        fewer = layers // parallel.pipeline
        return f"parallel.virtual_stages={fewer}" if fewer > 1 else "parallel.pipeline_schedule=1f1b"
    return f"parallel.pipeline={max(1, layers // each)}"

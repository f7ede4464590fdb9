"""Benchmarks of a run's checkpoints by lm-eval."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from headway.config.base import Section
from headway.config.sections.supervise import Seconds
from headway.config.units import StepInterval
from headway.core.coordination.launched import workers_of_this_machine, world_size_from_environment
from headway.core.errors import ConfigError

#: The device that means: when training has ended, on what it has left free.
AFTER = "after"


class BenchmarksConfig(Section):
    """Tasks of lm-eval on the run's model (extra `lm-eval`), each time in a separate process."""

    tasks: Annotated[list[str], Field(min_length=1)]
    """Names of lm-eval's tasks, or YAML files that define tasks of your own."""
    every: StepInterval | None = None
    """How often during training, in steps or tokens: at the first checkpoint from each multiple on. Needs another
    `device` than `after`. The end of training is always measured."""
    device: Annotated[str, Field(pattern=r"^(after|cpu|cuda:\d+)$")] = AFTER
    """Where the tasks run. `after`: at the end, on what training has used. `cpu`, or a GPU on which no worker trains:
    beside training."""
    limit: PositiveInt | None = None
    """Documents per task, at most; all when null."""
    few_shot: Annotated[int, Field(ge=0)] | None = None
    """Examples before each question; as the task says when null."""
    rows: PositiveInt = 8
    """Texts that are computed at once."""
    timeout_seconds: Seconds = 14400.0
    """Benchmarks that take longer are ended, with a warning."""
    download: bool = False
    """Whether the process may ask the Hub for data sets; otherwise they must be local files or in the cache."""


def is_file(task: str) -> bool:
    """Return whether a task is given as a YAML file."""
    return task.endswith((".yaml", ".yml"))


def benchmark_problems(wanted: BenchmarksConfig, device: str, workers: int) -> Iterator[ConfigError]:
    """Yield what cannot be done as it is asked for.

    Args:
        device: `train.device`.
        workers: `parallel.workers`, for a machine on which no launcher has started others.
    """
    for task in wanted.tasks:
        if is_file(task) and not Path(task).is_file():
            yield ConfigError(
                f"there is no file {task}", where="evaluation.benchmarks.tasks", fix="correct its path, or name a task"
            )
    if wanted.every is not None and wanted.device == AFTER:
        yield ConfigError(
            "benchmarks during training need a device that training does not use",
            where="evaluation.benchmarks.every, evaluation.benchmarks.device",
            fix="evaluation.benchmarks.device=cpu, or leave out evaluation.benchmarks.every",
        )
    gpu = re.fullmatch(r"cuda:(\d+)", wanted.device)
    workers = _workers_here(workers)
    if gpu and device != "cpu" and int(gpu[1]) < workers:
        yield ConfigError(
            f"a worker trains on {wanted.device}",
            where="evaluation.benchmarks.device",
            fix=f"evaluation.benchmarks.device=cuda:{workers} if there is one, or cpu",
        )


def _workers_here(wanted: int) -> int:
    """Return the number of workers on this machine: those that a launcher has started, or those of the config."""
    try:
        started = world_size_from_environment()
        return wanted if started is None else workers_of_this_machine(started)
    except ConfigError:  # reported by the check of the workers
        return wanted

"""The pipeline of a task whose model is cut into stages."""

from __future__ import annotations

import torch

from headway.config import ParallelConfig
from headway.core.errors import ConfigError
from headway.core.types import MicroBatch
from headway.parallel.pipeline import Pipeline
from headway.parallel.world import World
from headway.training.setup.precision import autocast
from headway.training.task import Task


def check_model_is_cut(task: Task, world: World) -> None:
    """Check that a model declares where it may be cut, if there is a pipeline.

    Raises:
        ConfigError: it does not.
    """
    if world.mesh.pp > 1 and (task.stages is None or task.objective.staged is None):
        raise ConfigError(
            f"{type(task.model).__name__} does not declare where it may be cut into pipeline stages",
            where="parallel.pipeline",
            fix="parallel.pipeline=1; other workers can share the data (parallel.strategy)",
        )


def make_pipeline(parallel: ParallelConfig, precision: str, task: Task, world: World) -> Pipeline | None:
    """Make the pipeline of a task, None without one; all workers must call it.

    Args:
        precision: `train.precision`.
    """
    if world.mesh.pp == 1:
        return None
    staged = task.objective.staged
    stages = task.stages
    model = task.model
    assert staged is not None
    assert stages is not None

    def forward(batch: MicroBatch, x: torch.Tensor | None, layers: range) -> torch.Tensor:
        # Only the forward pass is under autocast: backward passes run in between.
        with autocast(precision, world.device):
            return staged.forward(model, batch, x, layers)

    sharing = world.mesh.cp * world.mesh.tp
    return Pipeline(
        parallel,
        model,
        world,
        stages=stages,
        forward=forward,
        output=lambda batch: staged.output(model, batch, sharing),
    )

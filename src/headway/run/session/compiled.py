"""Decision whether a run is compiled, for `train.compile: auto`."""

from __future__ import annotations

from headway.checkpoint.store import CheckpointInfo
from headway.config import Config, LaneGrid
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.parallel.world import World
from headway.training.setup.compiling import compiling_pays
from headway.training.task import Task


def decide_compile(config: Config, task: Task, world: World, grid: LaneGrid, start: CheckpointInfo | None) -> bool:
    """Decide whether to compile; with `train.compile=auto` as the run began, or as it pays.

    All workers must call it.

    Raises:
        ConfigError: the gain cannot be measured for a model of this kind.
    """
    if config.train.compile != "auto":
        return config.train.compile
    before = start.context.get("compiled") if start else None
    if isinstance(before, bool):
        return before
    if not isinstance(task.model, Decoder):
        raise ConfigError(
            f"torch.compile can be measured for the native decoder only, not for {type(task.model).__name__}",
            where="train.compile",
            fix="train.compile=true, or false",
        )
    if not world.is_first:
        return bool(world.broadcast_number(0))
    assert config.train.steps is not None, "the config is resolved"
    micro_batches = len(grid.of_worker(world.data_rank, world.mesh.data)) * grid.micro_batches * config.train.steps
    pays = compiling_pays(config, world.device, grid.micro_batch, micro_batches)
    world.broadcast_number(int(pays))
    return pays

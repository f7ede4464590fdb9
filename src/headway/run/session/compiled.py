"""Decision whether a run is compiled, for `train.compile: auto`."""

from __future__ import annotations

from headway.checkpoint.store import CheckpointInfo
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.training.assembled import Assembled
from headway.training.setup.compiling import compiling_pays


def decide_compile(assembled: Assembled, start: CheckpointInfo | None) -> bool:
    """Decide whether to compile; with `train.compile=auto` as the run began, or as it pays.

    All workers must call it.

    Raises:
        ConfigError: the gain cannot be measured for a model of this kind.
    """
    config = assembled.config
    world = assembled.world
    model = assembled.task.model
    if config.train.compile != "auto":
        return config.train.compiles
    before = start.context.get("compiled") if start else None
    if isinstance(before, bool):
        return before
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"torch.compile can be measured for the native decoder only, not for {type(model).__name__}",
            where="train.compile",
            fix="train.compile=true, or false",
        )
    if not world.is_first:
        return bool(world.broadcast_number(0))
    grid = assembled.grid
    micro_batches = len(assembled.lanes) * grid.micro_batches * assembled.total_steps
    pays = compiling_pays(
        config.model,
        config.train,
        config.determinism,
        world.device,
        rows=grid.micro_batch,
        micro_batches=micro_batches,
    )
    world.broadcast_number(int(pays))
    return pays

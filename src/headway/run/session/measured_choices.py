"""Choices by measurement that a run keeps: its attention on a CPU, and compilation for `train.compile: auto`."""

from __future__ import annotations

from headway.checkpoint.store import CheckpointInfo
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.models.layers.attention import attends_by_products
from headway.training.assembled import Assembled
from headway.training.setup.attention_trial import products_pay
from headway.training.setup.compiling import compiling_pays


def decide_attention(assembled: Assembled, start: CheckpointInfo | None) -> bool:
    """Decide whether this run computes causal attention on a CPU by products: as it began, or as a trial shows.

    All workers must call it.
    """
    world = assembled.world
    before = start.context.get("attention_by_products") if start else None
    if isinstance(before, bool):
        return before
    if start is not None or not _can_try_attention(assembled):
        return attends_by_products()
    if not world.is_first:
        return bool(world.broadcast_number(0))
    train = assembled.config.train
    model = assembled.task.model
    assert isinstance(model, Decoder)
    chosen = products_pay(
        model.shape,
        train.precision,
        rows=assembled.grid.micro_batch,
        length=train.sequence_length,
        micro_batches=_micro_batches(assembled),
    )
    world.broadcast_number(int(chosen))
    return chosen


def _can_try_attention(assembled: Assembled) -> bool:
    """Return whether there are two ways, and the choice may depend on a trial: elastic bits may not."""
    config = assembled.config
    model = assembled.task.model
    if assembled.world.device.type != "cpu" or config.determinism == "elastic" or config.train.precision == "fp16":
        return False
    if not isinstance(model, Decoder) or assembled.world.mesh.tp > 1:
        return False
    return model.config.attention_softcap is None and bool(model.shape.attention_layers)


def _micro_batches(assembled: Assembled) -> int:
    """Return the number of micro-batches that this worker computes in the whole run."""
    return len(assembled.lanes) * assembled.grid.micro_batches * assembled.total_steps


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
    pays = compiling_pays(
        config.model,
        config.train,
        config.determinism,
        world.device,
        rows=grid.micro_batch,
        micro_batches=_micro_batches(assembled),
    )
    world.broadcast_number(int(pays))
    return pays

"""A trial of one micro-batch before the first step, so that a lack of memory shows before a run has begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from headway.config.optimizers import find_optimizer
from headway.config.strategies import effective_strategy, find_strategy, simplest_strategy
from headway.core.errors import ConfigError
from headway.core.types import Feed, MicroBatch
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.training.precision import autocast
from headway.training.state import TrainState, kept_buffers
from headway.training.step import prepare_own_losses, scaled
from headway.training.task import Task, to_device

if TYPE_CHECKING:
    from headway.config import Config

#: Texts of errors without a type of their own: two of the host's, CUDA's outside of PyTorch's allocator, cuBLAS's.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def trial_step(
    config: Config, task: Task, state: TrainState, strategy: Strategy, world: World, *, batch: MicroBatch
) -> None:
    """Compute a gradient while moments are in place, and discard it. All workers must call it.

    Nothing that training reads changes: no weight, moment, buffer or random state.

    Raises:
        ConfigError: memory ran out; the message names what takes less.
    """
    optimizer, cursor, engine = state.optimizer, state.cursor, state.engine
    fresh = not optimizer.state
    cuda = [world.device] if world.device.type == "cuda" else []
    exchanges = exchanges_in_trial(config, world)
    try:
        with torch.random.fork_rng(devices=cuda), explain_out_of_memory(config, batch), kept_buffers(state.model):
            state.prepare_to_load()  # creates moments if there are none
            strategy.begin()
            prepare_own_losses(state.model, cursor.loss_scale)
            with strategy.micro_batch(True, last=exchanges):
                with autocast(config.train.precision, world.device):
                    loss = task.objective.summed_loss(state.trained, to_device(batch, world.device))
                to_differentiate = scaled(loss, cursor.loss_scale)
                if engine is None:
                    to_differentiate.backward()
                else:
                    engine.backward(to_differentiate)
            if exchanges:
                strategy.end_lane()
                strategy.reduce()
            if engine is not None:
                engine.skip()
    finally:
        strategy.begin()  # clears gradients
        if fresh:
            optimizer.state.clear()


def exchanges_in_trial(config: Config, world: World) -> bool:
    """Return whether workers exchange gradients in a trial.

    They do not where gradients can be summed after the backward pass: a worker whose memory runs out must not leave
    others waiting for its part. Elastic sums are exchanged, since they take memory of their own.
    """
    strategy = find_strategy(effective_strategy(config.parallel.strategy, world.mesh))
    return config.determinism == "elastic" or not strategy.keeps_whole_gradients


def largest_micro_batch(feed: Feed, lane: int, first: int, last: int) -> MicroBatch:
    """Return a micro-batch of the steps `first` to `last` (exclusive) with the longest rows that the feed knows of."""
    longest = getattr(feed, "longest_step", None)
    return feed.batch(first if longest is None else longest(first, last), lane)[0]


@contextmanager
def explain_out_of_memory(config: Config, batch: Any) -> Iterator[None]:
    """Turn a lack of memory over a micro-batch into an error that names remedies.

    Args:
        batch: The micro-batch, or several of one shape in any nesting.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        sizes = [" x ".join(map(str, tensor.shape)) for tensor in tensors if tensor.ndim]
        raise ConfigError(
            f"a micro-batch ({sizes[0] if sizes else 'of unknown shape'}) does not fit into memory with weights,"
            f" gradients and moments: {str(error).splitlines()[0]}",
            where="train.micro_batch",
            fix="one or more of: " + ", ".join(_savings(config)),
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _savings(config: Config) -> Iterator[str]:
    """Yield the settings that would take less memory than the config does, cheapest first."""
    train, strategy = config.train, find_strategy(config.parallel.strategy)
    yield "a smaller train.micro_batch (or auto), which does not change the global batch"
    if train.activation_checkpointing == "none":
        yield "train.activation_checkpointing=selective"
    if train.activation_checkpointing != "full":
        yield "train.activation_checkpointing=full"
    if train.precision in ("fp32", "tf32"):
        yield "train.precision=bf16"
    if not strategy.shards_gradients and config.parallel.workers > 1:
        yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_gradients)}"
    if not strategy.shards_weights and config.parallel.workers > 1:
        yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_weights)}"
    if lighter := find_optimizer(config.optimizer.name).lighter:
        yield f"optimizer.name={' or '.join(lighter)}"
    if not config.optimizer.offload:
        yield "optimizer.offload=true"

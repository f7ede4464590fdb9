"""Trials of a micro-batch before the first step, so that a lack of memory shows before a run has begun.

By the same means `train.micro_batch: auto` finds the largest micro-batch that fits into memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config import OptimizerConfig, ParallelConfig, TrainConfig
from headway.config.derived.mesh import effective_strategy
from headway.config.optimizers import find_optimizer
from headway.config.strategies import find_strategy, simplest_strategy
from headway.core.coordination.launched import workers_of_this_machine
from headway.core.errors import ConfigError
from headway.core.machine.memory import allowed_bytes
from headway.core.machine.system import Machine
from headway.core.types import Feed, KnowsLongestStep, MicroBatch
from headway.parallel.blocks import local_part
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.setup.precision import autocast
from headway.training.state import TrainState, kept_buffers
from headway.training.step import backward, prepare_own_losses
from headway.training.task import to_device

#: Texts of errors without a type of their own: two of the host's, CUDA's outside of PyTorch's allocator, cuBLAS's.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

#: The share of the available memory that a run may plan to use. On a GPU the rest is for the allocator's fragmentation
#: and for what NCCL allocates later; on the host it is also for all other processes.
_USABLE = {"cuda": 0.92, "cpu": 0.5}


def trial_step(assembled: Assembled, batch: MicroBatch) -> None:
    """Compute a gradient while moments are in place, and discard it. All workers must call it.

    Nothing that training reads changes: no weight, moment, buffer or random state.

    Raises:
        ConfigError: memory ran out; the message names what takes less.
    """
    config = assembled.config
    state = assembled.state
    world = assembled.world
    optimizer = state.optimizer
    fresh = not optimizer.state
    cuda = [world.device] if world.device.type == "cuda" else []
    explained = explain_out_of_memory(config.train, config.parallel, config.optimizer, batch)
    exchanges = exchanges_in_trial(config.parallel.strategy, config.determinism, world)
    try:
        with torch.random.fork_rng(devices=cuda), explained, kept_buffers(state.model):
            state.prepare_to_load()  # creates moments if there are none
            compute_gradients(assembled, batch, exchanges=exchanges)
            if state.engine is not None:
                state.engine.skip()
    finally:
        assembled.strategy.begin()  # clears gradients
        if fresh:
            optimizer.state.clear()


def compute_gradients(assembled: Assembled, batch: MicroBatch, *, exchanges: bool = True) -> None:
    """Compute the gradients of one micro-batch, as those of a whole step, outside of steps.

    `strategy.begin` clears them.

    Args:
        batch: The micro-batch, on any device.
        exchanges: Whether workers sum their gradients; then all of them must call it.
    """
    state = assembled.state
    strategy = assembled.strategy
    device = assembled.world.device
    strategy.begin()
    prepare_own_losses(state.model, state.cursor.loss_scale)
    with strategy.micro_batch(True, last=exchanges):
        with autocast(assembled.config.train.precision, device):
            loss = assembled.task.objective.summed_loss(state.trained, to_device(batch, device))
        backward(state, loss)
    if exchanges:
        strategy.end_lane()
        strategy.reduce()


def exchanges_in_trial(strategy_name: str, determinism: str, world: World) -> bool:
    """Return whether workers exchange gradients in a trial.

    They do not where gradients can be summed after the backward pass: a worker whose memory runs out must not leave
    others waiting for its part. Elastic sums are exchanged, since they take memory of their own.
    """
    strategy = find_strategy(effective_strategy(strategy_name, world.mesh))
    return determinism == "elastic" or not strategy.keeps_whole_gradients


def largest_micro_batch(feed: Feed, lane: int, first: int, last: int) -> MicroBatch:
    """Return a micro-batch of the steps `first` to `last` (exclusive) with the longest rows that the feed knows of."""
    longest = feed.longest_step(first, last) if isinstance(feed, KnowsLongestStep) else first
    return feed.batch(longest, lane)[0]


@contextmanager
def explain_out_of_memory(
    train: TrainConfig, parallel: ParallelConfig, optimizer: OptimizerConfig, batch: Any
) -> Iterator[None]:
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
            fix="one or more of: " + ", ".join(_savings(train, parallel, optimizer)),
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _savings(train: TrainConfig, parallel: ParallelConfig, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield the settings that would take less memory than the config does, cheapest first."""
    strategy = find_strategy(parallel.strategy)
    yield "a smaller train.micro_batch (or auto), which does not change the global batch"
    if train.activation_checkpointing == "none":
        yield "train.activation_checkpointing=selective"
    if train.activation_checkpointing not in ("full", "offload"):
        yield "train.activation_checkpointing=full"
    if train.activation_checkpointing != "offload" and not train.compile:
        yield "train.activation_checkpointing=offload"
    if train.precision in ("fp32", "tf32"):
        yield "train.precision=bf16"
    if not strategy.shards_gradients and parallel.all_workers > 1:
        yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_gradients)}"
    if not strategy.shards_weights and parallel.all_workers > 1:
        yield f"parallel.strategy={simplest_strategy(lambda spec: spec.shards_weights)}"
    if train.weights != "fp32":  # moments and their update are on the host already
        return
    if lighter := find_optimizer(optimizer.name).lighter:
        yield f"optimizer.name={' or '.join(lighter)}"
    if not optimizer.offload:
        yield "optimizer.offload=true"


def largest_that_fits(
    choices: Sequence[int],
    attempt: Callable[[int], None],
    state: TrainState,
    world: World,
    limit_bytes: int,
    *,
    again: bool = True,
) -> int:
    """Return the largest micro-batch whose peak stays within a limit; all workers find the same one.

    Activations grow in proportion to rows, so two small trials predict the peak of any number. On a GPU the choice is
    then tried, and smaller ones after it until one fits. Predictions depend on shapes alone, not on other load, so a
    run that starts over makes the same choice.

    Args:
        choices: Numbers of rows.
        attempt: Computes a gradient of that many rows.
        limit_bytes: What this worker may use.
        again: Whether another number may be tried when memory runs out. It may not where workers exchange parts of
            gradients during the backward pass: the others would still wait for this worker's part, and PyTorch's
            sharded units would stay in mid-pass and yield no more gradients, without an error.

    Raises:
        ConfigError: the smallest does not fit, or the chosen one on a GPU where no other may be tried.
    """
    choices = sorted(choices)
    chosen = choices[0]
    if len(choices) > 1:
        # The very smallest may peak where all gradients exist and all activations are freed, so it predicts nothing.
        few, more = choices[1:3] if len(choices) > 2 else choices
        peak = _peak(attempt, few, state, world)
        per_row = max(0, _peak(attempt, more, state, world) - peak) / (more - few)
        chosen = max((n for n in choices if peak + per_row * (n - few) <= limit_bytes), default=choices[0])
    chosen = int(min(worker[0] for worker in world.gather([float(chosen)])))
    if world.device.type == "cuda" and chosen > choices[0] and not again:
        _try_once(attempt, chosen, max(rows for rows in choices if rows < chosen))
        return chosen
    while world.device.type == "cuda" and chosen > choices[0]:
        failed = _fails(attempt, chosen)
        if not any(worker[0] for worker in world.gather([float(failed)])):
            break
        chosen = max(rows for rows in choices if rows < chosen)
    return chosen


def memory_limit_bytes(world: World, machine: Machine | None = None) -> int:
    """Return the memory that one worker may plan to use: on its GPU, or of what this host, container or job allows."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        # What CUDA itself, NCCL and other processes occupy is not free; PyTorch's allocator does not know of it.
        return int((free + torch.cuda.memory_reserved(world.device)) * _USABLE["cuda"])
    return int(allowed_bytes(machine or Machine()) * _USABLE["cpu"] / workers_of_this_machine(world.size))


def _try_once(attempt: Callable[[int], None], rows: int, fewer: int) -> None:
    try:
        attempt(rows)
    except ConfigError as error:
        if error.__cause__ is None or not is_out_of_memory(error.__cause__):
            raise
        raise ConfigError(error.what, where="train.micro_batch", fix=f"train.micro_batch={fewer}, or less") from error


def _fails(attempt: Callable[[int], None], rows: int) -> bool:
    try:
        attempt(rows)
    except ConfigError:
        pass  # leave the block first, so that the tensors that the error references are freed
    else:
        return False
    torch.cuda.empty_cache()
    return True


def _peak(attempt: Callable[[int], None], rows: int, state: TrainState, world: World) -> int:
    """Measure the peak of bytes allocated during an attempt."""
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        attempt(rows)
        return int(torch.cuda.max_memory_allocated(world.device))
    with LiveBytes() as live:
        attempt(rows)
    gradients = (local_part(p.grad) for p in state.model.parameters() if p.grad is not None)
    kept = [*(block.local for block in state.blocks().values()), *gradients]
    return int(live.peak) + sum(tensor.nbytes for tensor in kept)


#: Types with a storage of their own; wrapper subclasses consist of these.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are created within the block, while they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if type(t) in _PLAIN}
        for tensor in tree_leaves(result):
            if type(tensor) in _PLAIN:
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self._known:
                    self._known.add(storage)
                    self._count(storage.nbytes())
                    weakref.finalize(storage, self._count, -storage.nbytes())
        return result

    def _count(self, change: int) -> None:
        self.now += change
        self.peak = max(self.peak, self.now)

"""`train.micro_batch: auto`: the largest micro-batch that fits into memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.core.errors import ConfigError
from headway.core.launched import workers_of_this_machine
from headway.core.machine import Machine
from headway.core.memory import allowed_bytes
from headway.parallel.blocks import local_part
from headway.parallel.world import World
from headway.training.state import TrainState
from headway.training.trial import is_out_of_memory

#: The share of the available memory that a run may plan to use. On a GPU the rest is for the allocator's fragmentation
#: and for what NCCL allocates later; on the host it is also for all other processes.
_USABLE = {"cuda": 0.92, "cpu": 0.5}


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

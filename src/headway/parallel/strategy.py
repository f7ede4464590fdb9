"""The protocol behind `parallel.strategy`; `config/strategies.py` has the table of strategies.

A strategy decides which worker keeps which weights, gradients and moments, and where gradients are summed. It is
created before the optimizer, since it may replace a module's parameters by shards. After `reduce` the `.grad` of every
parameter that this worker updates is the **sum** over all lanes of the global batch, or the worker's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from headway.config import Config
from headway.config.derived.mesh import effective_strategy
from headway.config.strategies import FOR_COPIES, FOR_ONE_WORKER, find_strategy
from headway.core.errors import ConfigError
from headway.core.functions import load_function
from headway.core.types import Block
from headway.parallel.blocks import is_first_of_equals
from headway.parallel.context import cut_rows
from headway.parallel.experts import shard_experts
from headway.parallel.replicas import replica_count
from headway.parallel.tensor import cut_matrices
from headway.parallel.world import World


class Strategy(Protocol):
    """How one training step is split over workers."""

    def owns_for_update(self, p: torch.Tensor) -> bool:
        """Return whether this worker's optimizer updates the parameter, or its part of it."""
        ...

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        """Return whether this worker's gradient of the parameter, or its part of it, enters the gradient norm."""
        ...

    def begin(self) -> None:
        """Prepare for a step before its first micro-batch: clear gradients."""
        ...

    def micro_batch(self, last_of_lane: bool, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward pass of one micro-batch; `last` marks the last one of this worker's step."""
        ...

    def end_lane(self) -> None:
        """Finish a lane after its last micro-batch."""
        ...

    def reduce(self) -> None:
        """Finish the sum over workers after all lanes of this worker."""
        ...

    def after_update(self) -> None:
        """Exchange updated weights after the optimizer's step."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Further methods of a strategy whose library performs the backward pass, the update and the storage itself."""

    model: nn.Module
    """The module to call in the forward pass of training."""

    def take_over(self, optimizer: Optimizer) -> None:
        """Hand over the optimizer of the module's trainable parameters; must be called first."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a summed loss."""
        ...

    def norm_parts(self) -> list[float]:
        """Return this worker's part of the gradient norm of the sum over all items (see `norms.norm_parts`)."""
        ...

    def update(self, scale: float) -> bool:
        """Update with the summed gradients times `scale`; return whether it was done, the same on every worker."""
        ...

    def skip(self) -> None:
        """Discard the gradients of this step."""
        ...

    def part_of(self, p: nn.Parameter) -> Block | None:
        """Return this worker's live part of a parameter; None if it has none."""
        ...

    def moments(self, p: nn.Parameter) -> Mapping[str, Block]:
        """Return this worker's part of the parameter's moments by name; empty before the first update."""
        ...

    def exposed(self) -> AbstractContextManager[None]:
        """Let the optimizer's groups hold the updated tensors for the duration of the block."""
        ...

    def loaded(self) -> None:
        """Refresh the weights of the forward pass after the blocks of `part_of` were overwritten."""
        ...


@runtime_checkable
class SavedInPlace(Protocol):
    """An engine whose blocks may be moved to the memory that saves are written from (`Block.movable`)."""

    @property
    def kept_in(self) -> Path | None:
        """The folder whose disk has the blocks, where memory is too short for them; None for memory."""
        ...

    def before_change(self, wait: Callable[[], None]) -> None:
        """Have a function called before these blocks change: it returns when no save reads them any more."""
        ...


class Single:
    """One worker; gradients accumulate where autograd puts them."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        if world.mesh.size != world.size or not _is_alone(module, world):
            raise ConfigError(
                f"strategy '{FOR_ONE_WORKER}' cannot use {world.size} workers",
                where="parallel.strategy",
                fix=f"parallel.strategy={FOR_COPIES}",
            )
        self._world = world
        self._parameters = list(module.parameters())  # listing them takes half a millisecond

    def owns_for_update(self, p: torch.Tensor) -> bool:
        return True

    def owns_for_norm(self, p: torch.Tensor) -> bool:
        return is_first_of_equals(p, self._world)

    def begin(self) -> None:
        for p in self._parameters:
            p.grad = None

    def micro_batch(self, last_of_lane: bool, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        # A missing gradient counts as zero, as it does with several workers.
        for p in self._parameters:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)

    def after_update(self) -> None:
        pass


def make_strategy(config: Config, module: nn.Module, world: World) -> Strategy:
    """Create the configured strategy around a module whose weights are initialised and on their device."""
    _check_no_running_statistics(module, world, config.determinism)
    spec = find_strategy(effective_strategy(config.parallel.strategy, world.mesh))
    shard_experts(module, world)
    if not spec.sums_gradients and spec.name != config.parallel.strategy and not _is_alone(module, world):
        spec = find_strategy(FOR_COPIES)  # tensor-parallel workers have copies of the experts
    if world.mesh.tp > 1:
        cut_matrices(module, world)
    if world.mesh.cp > 1:
        cut_rows(module, world)
    build = spec.build_elastic if config.determinism == "elastic" and spec.build_elastic else spec.build
    if config.train.weights != "fp32":
        build = spec.build_on_host or spec.build
    _, make = load_function(build, "parallel.strategy")
    strategy: Strategy = make(module, world, config)
    return strategy


def _is_alone(module: nn.Module, world: World) -> bool:
    """Return whether no other worker computes gradients of this worker's parameters."""
    return world.mesh.replicas == 1 and all(replica_count(p, world) == 1 for p in module.parameters())


def _check_no_running_statistics(module: nn.Module, world: World, determinism: str) -> None:
    """Reject batch and instance norms with running statistics, which would differ between workers."""
    if world.size == 1 and determinism != "elastic":
        return
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats:
            raise ConfigError(
                "normalisation with running statistics sees different batches on every worker",
                where=f"module '{name}'",
                fix="use GroupNorm or LayerNorm, track_running_stats=False, or one worker without determinism=elastic",
            )

"""The protocol behind `parallel.strategy`, and the table of strategies.

A strategy decides who keeps what of weights, gradients and moments, and where gradients are summed. It is made before
the optimizer, since it may replace a module's parameters by parts of them. After `reduce` the `.grad` of every
parameter that this worker updates is the **sum** over all lanes of the global batch, or the worker's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from headway.config.deepspeed import DEEPSPEED
from headway.config.mesh import FULLY_SHARDED, effective_strategy
from headway.core.errors import ConfigError
from headway.core.types import Block
from headway.parallel.blocks import is_first_of_equals
from headway.parallel.experts import shard_experts
from headway.parallel.replicas import replica_count
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.config import Config


class Strategy(Protocol):
    """How one training step is spread over workers."""

    def updates(self, p: torch.Tensor) -> bool:
        """Whether this worker's optimizer has the parameter, or its part of it."""
        ...

    def counts(self, p: torch.Tensor) -> bool:
        """Whether this worker is the one that counts what it has of a parameter into norms."""
        ...

    def begin(self) -> None:
        """Before the first micro-batch of a step: gradients are cleared."""
        ...

    def micro_batch(self, last_of_lane: bool, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` is the last one of this worker's step."""
        ...

    def end_lane(self) -> None:
        """After the last micro-batch of a lane."""
        ...

    def reduce(self) -> None:
        """After all lanes of this worker: finish the sum over workers."""
        ...

    def after_update(self) -> None:
        """After the optimizer's step: bring the weights that others have updated."""
        ...


@runtime_checkable
class Engine(Protocol):
    """What a strategy is besides, whose library wants backward pass, update and storage to itself."""

    model: nn.Module
    """What a forward pass that trains calls in place of the module."""

    def take_over(self, optimizer: Optimizer) -> None:
        """Before anything else: the optimizer is the one for the module's trainable parameters."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a summed loss."""
        ...

    def norm_parts(self) -> list[float]:
        """What this worker's gradients add to the norm of the sum over all items (see `norms.norm_parts`)."""
        ...

    def update(self, scale: float) -> bool:
        """Update with the summed gradients times `scale`; returns whether that was done, the same on every worker."""
        ...

    def skip(self) -> None:
        """Forget the gradients of this step."""
        ...

    def part_of(self, p: nn.Parameter) -> Block | None:
        """What this worker has of a parameter, live; None if nothing."""
        ...

    def moments(self, p: nn.Parameter) -> Mapping[str, Block]:
        """What it has of the parameter's moments, by name; nothing before there are any."""
        ...

    def exposed(self) -> AbstractContextManager[None]:
        """Within it, the optimizer's groups hold what it updates."""
        ...

    def loaded(self) -> None:
        """After what `part_of` gives was overwritten: bring the weights that forward passes see up to it."""
        ...


_Maker = Callable[[nn.Module, World, "Config"], Strategy]


class Single:
    """One worker; gradients add up where autograd leaves them."""

    def __init__(self, module: nn.Module, world: World, config: Config) -> None:
        if world.mesh.size != world.size or not _is_alone(module, world):
            raise ConfigError(
                f"strategy 'single' cannot use {world.size} workers",
                where="parallel.strategy",
                fix="parallel.strategy=ddp",
            )
        self._world = world
        self._parameters = list(module.parameters())  # going through all modules takes half a millisecond

    def updates(self, p: torch.Tensor) -> bool:
        return True

    def counts(self, p: torch.Tensor) -> bool:
        return is_first_of_equals(p, self._world)

    def begin(self) -> None:
        for p in self._parameters:
            p.grad = None

    def micro_batch(self, last_of_lane: bool, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        # A parameter without a gradient counts as one with a gradient of zero, as it does with several workers.
        for p in self._parameters:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)

    def after_update(self) -> None:
        pass


def make_strategy(config: Config, module: nn.Module, world: World) -> Strategy:
    """The strategy that a config asks for, around a module whose weights are already in place and on their device."""
    _check_no_running_statistics(module, world, config.determinism)
    elastic, name = config.determinism == "elastic", effective_strategy(config.parallel.strategy, world.mesh)
    if name in DEEPSPEED:
        from headway.parallel.deepspeed import DeepSpeed

        return DeepSpeed(module, world, config)
    shard_experts(module, world)
    if name == "single" != config.parallel.strategy and not _is_alone(module, world):
        name = "ddp"  # of experts that tensor-parallel workers have copies of
    if world.mesh.tp > 1:
        from headway.parallel.tensor import cut_matrices

        cut_matrices(module, world)
    if world.mesh.cp > 1:
        from headway.parallel.context import cut_rows

        cut_rows(module, world)
    if name in FULLY_SHARDED:
        from headway.parallel.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(module, world, config)
    from headway.parallel.ddp import DataParallel, ElasticDataParallel
    from headway.parallel.zero import ElasticZero, Zero1, Zero2

    plain: dict[str, _Maker] = {"single": Single, "ddp": DataParallel, "zero1": Zero1, "zero2": Zero2}
    in_tree: dict[str, _Maker] = {"zero1": ElasticZero, "zero2": ElasticZero}
    if elastic:
        return in_tree.get(name, ElasticDataParallel)(module, world, config)
    return plain[name](module, world, config)


def _is_alone(module: nn.Module, world: World) -> bool:
    """Whether nobody else computes gradients of anything that this worker has."""
    return world.mesh.replicas == 1 and all(replica_count(p, world) == 1 for p in module.parameters())


def _check_no_running_statistics(module: nn.Module, world: World, determinism: str) -> None:
    """Batch and instance norms keep state outside weights and moments that every worker would see differently."""
    if world.size == 1 and determinism != "elastic":
        return
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats:
            raise ConfigError(
                "normalisation with running statistics sees other batches on every worker",
                where=f"module '{name}'",
                fix="use GroupNorm or LayerNorm, track_running_stats=False, or one worker without determinism=elastic",
            )

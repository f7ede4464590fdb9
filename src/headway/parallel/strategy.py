"""The protocol behind `parallel.strategy`, and the table of strategies.

A strategy decides where gradients are summed. The training step calls it at four points and knows nothing else about
it; after `reduce` every parameter's `.grad` is the **sum** over all lanes of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from headway.core.errors import ConfigError
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.config import Config


class Strategy(Protocol):
    """How one training step is spread over workers."""

    def begin(self) -> None:
        """Before the first micro-batch of a step: gradients are cleared."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; `last` is the last one of this worker's step."""
        ...

    def end_lane(self) -> None:
        """After the last micro-batch of a lane."""
        ...

    def reduce(self) -> None:
        """After all lanes of this worker: finish the sum over workers."""
        ...


class Single:
    """One worker; gradients add up where autograd leaves them."""

    def __init__(self, module: nn.Module, world: World) -> None:
        if world.size > 1:
            raise ConfigError(
                f"strategy 'single' cannot use {world.size} workers",
                where="parallel.strategy",
                fix="parallel.strategy=ddp",
            )
        self._module = module

    def begin(self) -> None:
        self._module.zero_grad(set_to_none=True)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def end_lane(self) -> None:
        pass

    def reduce(self) -> None:
        # A parameter without a gradient counts as one with a gradient of zero, as it does with several workers.
        for p in self._module.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


def make_strategy(config: Config, module: nn.Module, world: World) -> Strategy:
    """The strategy that a config asks for, around a module whose weights are already in place."""
    from headway.parallel.ddp import DataParallel, ElasticDataParallel

    _refuse_running_statistics(module, world, config.determinism)
    if config.determinism == "elastic":
        return ElasticDataParallel(module, world)
    name = config.parallel.strategy
    if name == "auto":
        name = "single" if world.size == 1 else "ddp"
    strategies: dict[str, Callable[[nn.Module, World], Strategy]] = {"single": Single, "ddp": DataParallel}
    return strategies[name](module, world)


def _refuse_running_statistics(module: nn.Module, world: World, determinism: str) -> None:
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

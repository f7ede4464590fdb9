"""Where a model's first values go: fp32 to host memory, rounded ones to the device, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from headway.parallel.blocks import block_of
from headway.parallel.materialize import allocate, materialize
from headway.parallel.strategy import Strategy
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.parallel.host_weights.engine import HostWeights  # loads distributed tensors


@torch.no_grad()
def place_on_both_sides(
    module: nn.Module,
    world: World,
    make: Callable[[], Strategy],
    first_value: Callable[[str, Sequence[int]], torch.Tensor] | None,
    *,
    cuts: bool,
    fresh: bool,
) -> Strategy:
    """Make a strategy of `parallel.host_weights` around a module, with masters on the host and weights on the device.

    Args:
        module: In host memory, where its fp32 weights become the masters without a copy; or on the meta device.
        make: Makes the strategy around the module.
        first_value: (name, size) -> whole tensor, where the module is on the meta device (`parallel.materialize`); None
            there leaves weights to be loaded.
        cuts: Whether the strategy replaces parameters by shards.
        fresh: Whether training starts from these values; otherwise others are about to be loaded.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if any(p.is_meta for p in module.parameters()):
        for p in trained.values():
            p.data = p.data.to(torch.bfloat16)
        if not cuts:  # shards are made without memory; owners own what has memory
            allocate(module, world.device)
        strategy = cast("HostWeights", make())
        materialize(module, world, first_value, keep=strategy.keep_first_value)
        return strategy
    if fresh:
        world.broadcast_(module.parameters())
    values = {}
    for name, p in trained.items():
        values[name] = p.data.float().contiguous()
        p.data = p.data.to(world.device, torch.bfloat16, memory_format=torch.contiguous_format)
    module.to(world.device)
    strategy = cast("HostWeights", make())
    for name, p in module.named_parameters():
        if name in values:
            strategy.keep_first_value(p, block_of(p).of(values.pop(name)))
    return strategy

"""Where a model's first values go: fp32 to host memory, rounded ones to the device, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from headway.parallel.materialize import materialize
from headway.parallel.world import World

if TYPE_CHECKING:
    from headway.parallel.host_weights.engine import HostWeights
    from headway.parallel.strategy import Strategy


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
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    values: dict[str, torch.Tensor] = {}
    if not any(p.is_meta for p in module.parameters()):
        if fresh:
            world.broadcast_(module.parameters())
        for p in module.parameters():
            if id(p) in names:
                values[names[id(p)]] = p.data.float().contiguous()
                p.data = p.data.to(world.device, torch.bfloat16, memory_format=torch.contiguous_format)
        module.to(world.device)
        strategy = make()
    else:
        for p in module.parameters():
            if id(p) in names:
                p.data = p.data.to(torch.bfloat16)
        made = make() if cuts else None  # shards are made without memory; owners own what has memory
        materialize(module, world, first_value, keep=values)
        strategy = make() if made is None else made
    cast("HostWeights", strategy).start_from(values)
    return strategy

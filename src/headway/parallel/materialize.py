"""Memory for a model that was cut before it had any: a worker never holds more than its parts and one whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from headway.parallel.blocks import block_of
from headway.parallel.world import World


@torch.no_grad()
def materialize(
    module: nn.Module,
    world: World,
    first_value: Callable[[str, Sequence[int]], torch.Tensor] | None,
    *,
    in_host_memory: bool = False,
) -> None:
    """Give a module on the meta device memory for this worker's parts, and the state its first values.

    A whole tensor is made from the value that the first worker has for it, one after the other, and each worker keeps
    its part: so it has the numbers that it has where a model is not cut. (Drawn part by part, every worker would draw
    the same ones.) All workers must call it.

    Args:
        module: With a method `make_buffers` for buffers that are no part of its state.
        first_value: (name, size) -> whole tensor, on workers that others get theirs from; None leaves weights as they
            are, for a caller that loads them.
        in_host_memory: Weights stay there; buffers are on the device in any case.
    """
    module.to_empty(device="cpu" if in_host_memory else world.device)
    module.make_buffers()  # type: ignore[operator]
    state = {} if first_value is None else module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        assert first_value is not None
        if world.is_copied:
            whole = first_value(name, tensor.shape).to(world.device, tensor.dtype)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        world.broadcast_([whole])
        part = block_of(tensor.detach())
        part.local.copy_(part.of(whole))
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(world.device)

"""Memory for a model that was sharded on the meta device: a worker holds only its shards and one whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from headway.core.model_protocol import MakesBuffers
from headway.parallel.blocks import block_of
from headway.parallel.world import World


@torch.no_grad()
def materialize(
    module: nn.Module,
    world: World,
    first_value: Callable[[str, Sequence[int]], torch.Tensor] | None,
    *,
    in_host_memory: bool = False,
    keep: dict[str, torch.Tensor] | None = None,
) -> None:
    """Allocate this worker's shards of a module on the meta device and fill its state with initial values.

    The first worker computes whole tensors one after the other, and each worker keeps its part. The values are
    therefore those of an unsharded model. (If every worker drew its own parts, all workers would draw the same
    numbers.) All workers must call this function.

    Args:
        module: It `MakesBuffers`, if it has some that are not part of its state.
        first_value: (name, size) -> whole tensor, called on the workers that send to others; None leaves weights
            uninitialised, for a caller that loads them.
        in_host_memory: Keep weights in host memory; buffers are on the device in any case.
        keep: Gets this worker's part of every first value by name, fp32, in host memory, before it is rounded.
    """
    module.to_empty(device="cpu" if in_host_memory else world.device)
    if isinstance(module, MakesBuffers):
        module.make_buffers()
    state = {} if first_value is None else module.state_dict(keep_vars=True)
    for name, tensor in state.items():
        assert first_value is not None
        dtype = tensor.dtype if keep is None else torch.float32
        device = world.device if world.size > 1 else torch.device("cpu")
        if world.is_copied:
            whole = first_value(name, tensor.shape).to(device, dtype)
        else:
            whole = torch.empty(tensor.shape, dtype=dtype, device=device)
        world.broadcast_([whole])
        part = block_of(tensor.detach())
        part.local.copy_(part.of(whole))
        if keep is not None and tensor.requires_grad:
            keep[name] = part.of(whole).to("cpu", copy=not part.is_whole)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(world.device)

"""Memory and values for a model on the meta device: a worker holds only its part of it and one whole tensor."""

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
    keep: Callable[[nn.Parameter, torch.Tensor], None] | None = None,
) -> None:
    """Allocate this worker's shards of a module on the meta device and fill its state with initial values.

    The first worker computes whole tensors one after the other, and each worker keeps its part. The values are
    therefore those of an unsharded model. (If every worker drew its own parts, all workers would draw the same
    numbers.) All workers must call this function.

    Args:
        module: It `MakesBuffers`, if it has some that are not part of its state. It may have memory from `allocate`.
        first_value: (name, size) -> whole tensor, called on the workers that send to others; None leaves weights
            uninitialised, for a caller that loads them.
        in_host_memory: Keep weights in host memory; buffers are on the device in any case.
        keep: Gets each parameter and this worker's part of its value in fp32, before it is rounded; it may keep that
            tensor.
    """
    if any(p.device.type == "meta" for p in module.parameters()):
        module.to_empty(device="cpu" if in_host_memory else world.device)
    if isinstance(module, MakesBuffers):
        module.make_buffers()
    state = {} if first_value is None else module.state_dict(keep_vars=True)
    # With one worker, a value that is kept in host memory never is on the device in fp32.
    device = torch.device("cpu") if keep is not None and world.size == 1 else world.device
    for name, tensor in state.items():
        assert first_value is not None
        kept = keep is not None and isinstance(tensor, nn.Parameter)
        dtype = torch.float32 if kept else tensor.dtype
        if world.is_copied:
            whole = first_value(name, tensor.shape).to(device, dtype)
        else:
            whole = torch.empty(tensor.shape, dtype=dtype, device=device)
        world.broadcast_([whole])
        part = block_of(tensor.detach())
        part.local.copy_(part.of(whole))
        if keep is not None and isinstance(tensor, nn.Parameter):
            keep(tensor, part.of(whole))
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = buffer.to(world.device)


@torch.no_grad()
def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module on the meta device memory without values, and leave tied parameters tied.

    Parameters become other objects, so call it before anything holds them. (`to_empty` would part tied ones.)
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, p in owner._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
            owner._parameters[key] = None if p is None else made[id(p)]
        for key, buffer in owner._buffers.items():
            owner._buffers[key] = None if buffer is None else torch.empty_like(buffer, device=device)

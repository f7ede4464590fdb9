"""An update that the device itself leaves out where loss or gradient is not finite.

So it is queued before the host has read either, and the device has work while the host reads. It is for runs in which
nothing but that decides about an update, and whose optimizer has a kernel that can be told to do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from headway.core.heartbeat import exchanging
from headway.parallel.blocks import local_part
from headway.training.optimizer import scales_while_updating, update_unless

if TYPE_CHECKING:
    from headway.config import Config
    from headway.parallel.world import World
    from headway.training.state import TrainState

#: Where the host runs ahead of what it has queued.
_QUEUES = ("cuda",)


def queues_update(config: Config, state: TrainState, world: World) -> bool:
    """Whether updates of this run are queued before the host knows loss and norm, the same in all of its attempts."""
    return (
        world.device.type in _QUEUES
        and world.mesh.pp == 1
        and state.engine is None
        and not config.optimizer.offload  # then gradients and norm are the host's
        and not state.decides  # about a spike the host does
        and state.cursor.loss_scale is None
        and config.determinism != "elastic"  # which has another norm
        and scales_while_updating(state.optimizer)
    )


@torch.no_grad()
def queue_update(
    config: Config,
    state: TrainState,
    world: World,
    counted: Iterable[nn.Parameter],
    losses: torch.Tensor,
    items: int,
    factor: float = 1.0,
) -> torch.Tensor:
    """Queue the update by gradients that are sums over all items: the mean and the clipping are one multiplication.

    Args:
        counted: The parameters whose gradient, or part of it, this worker counts; no other worker counts it.
        losses: Loss sums of this worker's lanes, (lanes,), on the device.
        items: Of the global batch.
        factor: What the norm is multiplied by, for tests.

    Returns:
        The norm of the mean gradient before clipping, not finite where any worker's loss or the gradient is not, or
        where there are no items; then nothing is updated. (), fp64, on the device, the same on every worker.
    """
    gradients = [part for p in counted if p.grad is not None and (part := local_part(p.grad)).numel()]
    # In fp64, as the host has it: one worker gets the same bits either way.
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else losses.new_zeros(())
    parts = torch.stack([norm.double().square(), (losses - losses).sum().double()])  # the latter 0, or not finite
    if world.size > 1:
        with exchanging("sum of norms", everyone=True, observed=not world.queues_exchanges):
            dist.all_reduce(parts)
    if not items:
        return torch.full_like(parts[0], torch.nan)
    total = parts[0].sqrt() / items * factor + parts[1]
    limit = config.train.max_grad_norm
    clip = torch.ones_like(total) if limit is None else (limit / (total + 1e-6)).clamp(max=1.0)
    update_unless(state.optimizer, ~total.isfinite(), clip / items)
    return total

"""An update that the device itself skips where loss or gradient is not finite.

So it is queued before the host has read either, and the device has work while the host reads and begins the next step.
It is for runs in which nothing else decides about an update, and whose optimizer has a kernel with a skip flag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from headway.core.coordination.heartbeat import exchanging
from headway.parallel.blocks import local_part
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.optimizer import scales_while_updating, update_unless

if TYPE_CHECKING:
    from headway.training.state import TrainState

#: Devices whose work the host queues ahead.
_QUEUES = ("cuda",)


def queues_update(assembled: Assembled) -> bool:
    """Return whether updates of this run are queued before the host knows loss and norm; equal in all attempts."""
    config = assembled.config
    state = assembled.state
    world = assembled.world
    return (
        world.device.type in _QUEUES
        and world.mesh.pp == 1
        and state.engine is None
        and not config.optimizer.offload  # then gradients and norm are on the host
        and not state.decides  # the host decides about spikes
        and state.cursor.loss_scale is None
        and config.determinism != "elastic"  # elastic runs compute another norm
        and scales_while_updating(state.optimizer)
    )


@torch.no_grad()
def mean_norm(
    world: World, counted: Iterable[nn.Parameter], losses: torch.Tensor, items: int, factor: float = 1.0
) -> torch.Tensor:
    """Compute the norm of the mean gradient before clipping, from gradients that are sums over all items.

    Args:
        counted: The parameters whose gradient, or part of it, this worker counts; no other worker counts it.
        losses: Loss sums of this worker's lanes, (lanes,), on the device.
        items: Items of the global batch.
        factor: A factor of the norm, for tests.

    Returns:
        (), fp64, on the device, equal on every worker; not finite where any worker's loss or the gradient is not, or
        where there are no items.
    """
    gradients = [part for p in counted if p.grad is not None and (part := local_part(p.grad)).numel()]
    # In fp64, as on the host, so that one worker gets the same bits either way.
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else losses.new_zeros(())
    parts = torch.stack([norm.double().square(), (losses - losses).sum().double()])  # the latter 0, or not finite
    if world.size > 1:
        with exchanging("sum of norms", everyone=True, observed=not world.queues_exchanges):
            dist.all_reduce(parts)
    return parts[0].sqrt() / items * factor + parts[1] if items else torch.full_like(parts[0], torch.nan)


@torch.no_grad()
def queue_update(state: TrainState, norm: torch.Tensor, items: int, max_norm: float | None) -> None:
    """Queue the update, which does nothing where the norm is not finite.

    The mean and the clipping are one multiplication.

    Args:
        norm: As `mean_norm` returns it.
        items: Items of the global batch.
        max_norm: `train.max_grad_norm`.
    """
    if items:
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        update_unless(state.optimizer, ~norm.isfinite(), clip / items)


def begin_reading(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start copying values, (n,), from the device to the host.

    Returns:
        A function that waits for the copy, but not for anything queued later, and returns the values.
    """
    if values.device.type != "cuda":
        return values.tolist
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)  # a copy to pageable memory would block
    there.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        numbers: list[float] = there.tolist()
        return numbers

    return read

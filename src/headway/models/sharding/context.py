"""Context parallelism: workers share the positions of a row and gather each other's keys and values.

Each worker computes its own queries against the keys and values of all positions, which every layer gathers (Dubey et
al. 2024, section 3.3.2). Under a causal mask late positions cost more. A row is therefore cut into twice as many parts
as there are workers; each worker gets a part from the front and its mirror image from the end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# Renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SharedPositions:
    """One worker's share of the positions of a row.

    Args:
        group: The workers that share rows.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the bounds of this worker's two parts of a row; `length` is a multiple of twice the workers."""
        part = length // (2 * self.size)
        if part * 2 * self.size != length:
            raise ValueError(f"a row of {length} positions cannot be cut into {2 * self.size} equal parts")
        return [(number * part, (number + 1) * part) for number in (self.rank, 2 * self.size - 1 - self.rank)]

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Select this worker's positions from a tensor with the positions of the whole row along `dim`."""
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.spans(x.shape[dim])], dim)

    def gather(self, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of all positions, in order; gradients return to the workers that own them."""
        both = torch.stack((k_BTKH, v_BTKH)).unflatten(2, (2, -1))
        everyone: torch.Tensor = _Gather.apply(both, self.group)  # type: ignore[no-untyped-call]
        front, back = everyone.unbind(3)  # (worker, 2, B, position, K, H) each
        k, v = torch.cat((front, back.flip(0))).movedim(0, 2).flatten(2, 3)
        return k, v


class _Gather(torch.autograd.Function):
    """Stack the tensors of all workers; the backward pass sums each tensor's gradients on the worker that owns it."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        everyone = mine.new_empty(dist.get_world_size(group), *mine.shape)
        _all_gather(everyone.flatten(0, 1), mine.contiguous(), group=group)
        return everyone

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        mine = gradient.new_empty(gradient.shape[1:])
        _reduce_scatter(mine, gradient.contiguous().flatten(0, 1), group=ctx.group)
        return mine, None

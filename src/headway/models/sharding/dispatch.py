"""Expert parallelism: tokens travel to the workers of their experts, and the results travel back.

Each worker of a group has an equal contiguous range of experts. Tokens are sorted by expert, and so by worker; one
all-to-all sends them, and another returns the results (Lepikhin et al. 2020, "GShard", section 3.2). Experts have no
capacity limit here, so routers determine the message sizes. A worker receives tokens in the order of the sending
workers, and within one worker in token order: a function of the data, not of timing.

Tensor-name suffixes as in `headway.models.layers.experts`; L experts of this worker, W workers of the group, S pairs
that this worker receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class Transfer(NamedTuple):
    """The number of tokens that workers exchange in one pass through one layer."""

    group: dist.ProcessGroup
    sent: list[int]
    """Pairs that this worker sends, by worker."""
    received: list[int]
    """Pairs that this worker receives, by worker."""
    expert_S1: torch.Tensor
    """int64: the local expert of each received pair, counted from 0."""
    counts_L: torch.Tensor
    """int64: the number of pairs of each local expert."""

    def there(self, x_PD: torch.Tensor) -> torch.Tensor:
        """Send tokens sorted by expert to the workers of those experts; (S, D)."""
        x_SD: torch.Tensor = _Exchange.apply(x_PD, self.sent, self.received, self.group)  # type: ignore[no-untyped-call]
        return x_SD

    def back(self, y_SD: torch.Tensor) -> torch.Tensor:
        """Return results to the workers that sent the tokens, in the order sent; (P, D)."""
        y_PD: torch.Tensor = _Exchange.apply(y_SD, self.received, self.sent, self.group)  # type: ignore[no-untyped-call]
        return y_PD


def plan_transfer(counts_E: torch.Tensor, group: dist.ProcessGroup) -> Transfer:
    """Exchange the number of tokens for each expert with the other workers; waits for the device.

    Args:
        counts_E: int64, the number of this worker's tokens for each expert of the layer.
        group: The workers that share the experts; all of them must call this function.
    """
    workers = dist.get_world_size(group)
    mine_WL = counts_E.view(workers, -1)
    theirs_WL = torch.empty_like(mine_WL)
    dist.all_to_all_single(theirs_WL, mine_WL.contiguous(), group=group)
    sent, received = torch.stack((mine_WL, theirs_WL)).sum(2).tolist()
    expert_WL = torch.arange(mine_WL.shape[1], device=counts_E.device).expand_as(theirs_WL)
    expert_S = expert_WL.flatten().repeat_interleave(theirs_WL.flatten(), output_size=sum(received))
    return Transfer(group, sent, received, expert_S.unsqueeze(1), theirs_WL.sum(0))


class _Exchange(torch.autograd.Function):
    """Send each worker its rows; gradients travel in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchanged(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group)
    return result

"""Lion: updates by the sign of an interpolated momentum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from headway.parallel.blocks import local_part

# Elements updated together: few kernels, and little memory for the directions.
_TOGETHER = 2**25


class Lion(Optimizer):
    """Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2), with one moment,
    `exp_avg`.

    Every element is updated independently, so shards are updated as the whole would be.

    Args:
        betas: The share of the moment kept for the direction, and the share kept from step to step.
        weight_decay: Decoupled.
    """

    def __init__(
        self, params: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for parameters in _chunks([p for p in group["params"] if p.grad is not None]):
                self._update(parameters, group)

    def _update(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        for p in parameters:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
        rate, (beta1, beta2) = group["lr"], group["betas"]
        weights = [local_part(p) for p in parameters]
        moments = [local_part(self.state[p]["exp_avg"]) for p in parameters]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        directions = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-rate)
        torch._foreach_lerp_(moments, gradients, 1 - beta2)


def _chunks(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in order, in lists of about `_TOGETHER` elements."""
    chunk: list[nn.Parameter] = []
    elements = 0
    for p in parameters:
        if chunk and elements + p.numel() > _TOGETHER:
            yield chunk
            chunk = []
            elements = 0
        chunk.append(p)
        elements += p.numel()
    if chunk:
        yield chunk

"""AdamW in host memory, piece by piece (Loshchilov & Hutter 2019; Ren et al. 2021, "ZeRO-Offload", section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from headway.parallel.host_weights.transfers import Transfers, pieces


@dataclass
class HostPart:
    """What host memory has of a parameter, or of this worker's part of it. All tensors have one shape."""

    weight: torch.Tensor
    """The live elements on the device."""
    master: torch.Tensor
    """What is updated, and saved."""
    total: torch.Tensor
    """The gradient summed over micro-batches so far, fp32."""
    group: dict[str, Any]
    """The optimizer's group: its learning rate and decay."""
    offset: tuple[int, ...]
    """Where the part begins in the whole parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    has_gradient: bool = False
    """Whether `total` is of this step."""


@dataclass(frozen=True)
class HostAdamW:
    """The update of parts in host memory by the optimizer's fused kernel for the CPU."""

    betas: tuple[float, float]
    eps: float
    moments: torch.dtype

    def first_moments(self, part: HostPart) -> dict[str, torch.Tensor]:
        """Return the moments of a part before its first update, by the names that checkpoints have for them."""
        zeros = {name: torch.zeros_like(part.master, dtype=self.moments) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **zeros}

    @torch.no_grad()
    def update(
        self, part: HostPart, state: dict[str, torch.Tensor], divisor: torch.Tensor, transfers: Transfers
    ) -> None:
        """Update a part and send its new weights to the device.

        Args:
            state: Its moments.
            divisor: fp32, (); the gradient is `part.total` divided by it.
        """
        flat = [t.view(-1) for t in (part.master, part.total, state["exp_avg"], state["exp_avg_sq"])]
        weight = part.weight.view(-1)
        for piece in pieces(weight.numel()):
            master, total, *moments = [tensor[piece] for tensor in flat]
            wide = [moment.float() for moment in moments]  # themselves, where they are fp32
            adamw(
                [master],
                [total],
                [wide[0]],
                [wide[1]],
                [],
                [state["step"].clone()],
                fused=True,
                grad_scale=divisor,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=part.group["lr"],
                weight_decay=part.group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )
            if self.moments != torch.float32:
                for moment, computed in zip(moments, wide, strict=True):
                    moment.copy_(computed)
            transfers.send(weight[piece], master)
        state["step"] += 1

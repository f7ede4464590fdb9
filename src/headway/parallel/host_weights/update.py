"""AdamW in host memory, piece by piece (Loshchilov & Hutter 2019; Ren et al. 2021, "ZeRO-Offload", section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from headway.parallel.host_weights.memory import HostMemory
from headway.parallel.host_weights.transfers import Transfers, pieces
from headway.parallel.stochastic_rounding import RoundingKey, round_pair


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
    name: str
    """Name of the parameter."""
    offset: tuple[int, ...]
    """Where the part begins in the whole parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    has_gradient: bool = False
    """Whether `total` is of this step."""

    @property
    def first(self) -> int:
        """Number of the first element in the whole parameter; the part is a run of neighbours in row-major order."""
        sizes = self.shape if len(self.offset) == len(self.shape) else ()
        return sum(start * math.prod(sizes[axis + 1 :]) for axis, start in enumerate(self.offset))


@dataclass(frozen=True)
class HostAdamW:
    """The update of parts in host memory by the optimizer's fused kernel for the CPU, which computes in fp32."""

    betas: tuple[float, float]
    eps: float
    masters: torch.dtype
    """fp32; or bf16 where weights have no masters: then weights and moments are rounded stochastically."""
    moments: torch.dtype
    seed: int
    """Of the random bits of such rounding."""

    def first_moments(self, part: HostPart, memory: HostMemory) -> dict[str, torch.Tensor]:
        """Return the moments of a part before its first update, by the names that checkpoints have for them."""
        zeros = {name: memory.empty(part.master.shape, self.moments).zero_() for name in ("exp_avg", "exp_avg_sq")}
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
            wide = [tensor.float() for tensor in (master, *moments)]  # themselves, where they are fp32
            adamw(
                [wide[0]],
                [total],
                [wide[1]],
                [wide[2]],
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
            if self.masters == torch.bfloat16:
                self._round(part, int(state["step"]), piece.start, wide, [master, *moments])
            elif self.moments != torch.float32:
                for moment, computed in zip(moments, wide[1:], strict=True):
                    moment.copy_(computed)
            transfers.send(weight[piece], master)
        state["step"] += 1

    def _round(
        self, part: HostPart, step: int, begin: int, wide: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> None:
        """Round weights and moments, with random bits that depend on the update and the element only."""
        first = part.first + begin
        round_pair(wide[:1], RoundingKey(self.seed, step, part.name), first, out[:1])
        round_pair(wide[1:], RoundingKey(self.seed, step, f"moments.{part.name}"), first, out[1:])

"""AdamW in host memory, piece by piece (Loshchilov & Hutter 2019; Ren et al. 2021, "ZeRO-Offload", section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from headway.parallel.host_weights.memory import HostMemory
from headway.parallel.host_weights.transfers import PIECE, Transfers, pieces
from headway.parallel.stochastic_rounding import RoundingKey, random_words, round_stochastically

#: Elements for one thread of an update that converts to fp32: with its copies they fit into a processor's own cache.
_THREAD_ELEMENTS = 2**15
#: A run for fewer threads would cost more in calls than it saves in memory.
_LEAST_THREADS = 4


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
        zeros = {name: memory.zeros(part.master.shape, self.moments) for name in ("exp_avg", "exp_avg_sq")}
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
        weight = part.weight.view(-1)
        total = part.total.view(-1)
        kept = [t.view(-1) for t in (part.master, state["exp_avg"], state["exp_avg_sq"])]
        size = self._run_elements()
        for piece in pieces(weight.numel()):
            for begin in range(piece.start, piece.stop, size):
                run = slice(begin, min(begin + size, piece.stop))
                here = [tensor[run] for tensor in kept]
                wide = [tensor.float() for tensor in here]  # themselves, where they are fp32
                self._step(wide, total[run], state["step"], divisor, part.group)
                if self.masters == torch.bfloat16:
                    self._round(wide, here, part.first + begin, part.name, int(state["step"]))
                elif self.moments == torch.bfloat16:
                    here[1].copy_(wide[1])
                    here[2].copy_(wide[2])
            transfers.send(weight[piece], kept[0][piece])
        state["step"] += 1

    def _run_elements(self) -> int:
        """Return how many elements to update at once: a piece, or what fits into caches with its copies in fp32."""
        if self.moments == torch.float32:
            return PIECE
        return min(PIECE, _THREAD_ELEMENTS * max(_LEAST_THREADS, torch.get_num_threads()))

    def _step(
        self,
        wide: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        step: torch.Tensor,
        divisor: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        """Update weights and both moments in fp32, in place."""
        weights, exp_avg, exp_avg_sq = wide
        adamw(
            [weights],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step.clone()],
            fused=True,
            grad_scale=divisor,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.eps,
            maximize=False,
        )

    def _round(
        self, wide: Sequence[torch.Tensor], out: Sequence[torch.Tensor], first: int, name: str, step: int
    ) -> None:
        """Round weights and both moments, with random bits that depend on the update and the element only.

        Args:
            first: Number of the first element in the whole parameter.
        """
        count = wide[0].numel()
        of_weights = random_words(RoundingKey(self.seed, step, name), first, count)
        of_moments = random_words(RoundingKey(self.seed, step, f"moments.{name}"), first, count)
        round_stochastically(wide[0], of_weights, out[0])
        round_stochastically(wide[1], of_moments.bitwise_right_shift(16), out[1])
        round_stochastically(wide[2], of_moments, out[2])

"""AdamW on the CPU whose bits do not depend on where a matrix is cut, as fast as the fused kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from headway.parallel.blocks import local_part

#: Elements. PyTorch's vectors have at most 16 numbers of 32 bits, and its threads cut buffers at multiples of that.
_WIDTH = 64


class WholeVectorAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) with the state of `torch.optim.AdamW`.

    PyTorch's fused kernel for the CPU processes a buffer in vectors, and the remainder at its end one by one, with
    other instructions that round differently. So bits depend on where buffers end. Here that remainder is copied into a
    buffer of whole vectors, so every element is processed as part of a vector.

    Args:
        params: Groups of parameters.
        betas: Decay rates of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            by_type: dict[torch.dtype, _Buffers] = defaultdict(_Buffers)
            for p in group["params"]:
                if p.grad is not None and local_part(p).numel():
                    state = self._state(p)
                    state["step"] += 1
                    tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
                    by_type[p.dtype].add([local_part(tensor) for tensor in tensors], state["step"])
            for buffers in by_type.values():
                buffers.update(group)

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state


@dataclass
class _Buffers:
    """Weights, gradients and moments of one type, as flat buffers of whole vectors."""

    flat: list[list[torch.Tensor]] = field(default_factory=lambda: [[], [], [], []])
    steps: list[torch.Tensor] = field(default_factory=list)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Pairs of the tensor that a result belongs to, and the buffer where the kernel leaves it."""

    def add(self, tensors: Sequence[torch.Tensor], step: torch.Tensor) -> None:
        """Add the tensors of one parameter: weight, gradient, moments."""
        count = tensors[0].numel()
        if not all(tensor.is_contiguous() for tensor in tensors):
            self._add_copied([tensor.reshape(-1) for tensor in tensors], step, tensors)
            return
        whole = count - count % _WIDTH
        if whole:
            self._append([tensor.view(-1)[:whole] for tensor in tensors], step)
        if whole < count:
            rest = [tensor.view(-1)[whole:] for tensor in tensors]
            self._add_copied(rest, step, rest)

    def update(self, group: dict[str, Any]) -> None:
        """Run the kernel over all buffers."""
        weights, gradients, first, second = self.flat
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            self.steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        for target, result in self.copies:
            target.copy_(result.view(target.shape))

    def _append(self, buffers: Sequence[torch.Tensor], step: torch.Tensor) -> None:
        for kind, buffer in zip(self.flat, buffers, strict=True):
            kind.append(buffer)
        self.steps.append(step)

    def _add_copied(self, flat: Sequence[torch.Tensor], step: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        count = flat[0].numel()
        padded = [torch.nn.functional.pad(tensor, (0, -count % _WIDTH)) for tensor in flat]
        self._append(padded, step)
        # The gradient, second in the list, is only read.
        self.copies += [(targets[place], padded[place][:count]) for place in (0, 2, 3)]

"""A matrix that is both embedding and vocabulary projection, with one gradient of its size instead of three.

The gradient of the projection is as large as the matrix. The gradient of the embedding has nonzero rows only for the
tokens of the batch. PyTorch allocates a second full matrix for it, and a third for the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class TiedGradient:
    """Holds the projection's gradient during one pass until the embedding's gradient, which comes last, is added.

    Create it first in a pass. Its buffer is the largest allocation; made first, it reuses the block of the previous
    step before a smaller tensor takes part of that block.

    Args:
        weight_VD: The matrix.
    """

    def __init__(self, weight_VD: torch.Tensor) -> None:
        self._room_VD: torch.Tensor | None = torch.empty_like(weight_VD, dtype=torch.float32)
        self._projection_VD: torch.Tensor | None = None

    def room(self) -> torch.Tensor | None:
        """Return the buffer for the projection's gradient, fp32, (V, D); None after the first call."""
        room_VD = self._room_VD
        self._room_VD = None
        return room_VD

    def put(self, gradient_VD: torch.Tensor) -> None:
        """Store the gradient of the projection; the embedding's backward pass writes to it in place."""
        self._projection_VD = gradient_VD

    def take(self) -> torch.Tensor | None:
        """Return the stored gradient; None after the first call."""
        gradient_VD = self._projection_VD
        self._projection_VD = None
        return gradient_VD


def takes_one_gradient(weight_VD: torch.Tensor) -> bool:
    """Return whether `tied_embedding` supports this tied matrix.

    It is tested on the CPU only, and not under a compiler, which does not see the stored gradient.
    """
    return (
        weight_VD.device.type == "cpu"
        and type(weight_VD) in (torch.Tensor, torch.nn.Parameter)
        and weight_VD.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def tied_embedding(ids_BT: torch.Tensor, weight_VD: torch.Tensor, tied: TiedGradient) -> torch.Tensor:
    """Compute `F.embedding` with a backward pass that gives the weight both gradients, with the bits of their sum.

    Args:
        ids_BT: int64, (B, T).
        weight_VD: (V, D).
        tied: Holds the projection's gradient, which the backward pass computes first.

    Returns:
        (B, T, D).
    """
    return _TiedEmbedding.apply(weight_VD, ids_BT, tied)  # type: ignore[no-untyped-call, no-any-return]


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: torch.Tensor, ids_BT: torch.Tensor, tied: TiedGradient) -> torch.Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.tied, ctx.like = tied, weight_VD.detach().to("meta")
        return F.embedding(ids_BT, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids_BT,) = ctx.saved_tensors
        total_VD = ctx.tied.take()
        if total_VD is None:  # the loss had no gradient
            total_VD = torch.zeros_like(ctx.like, device=grad_BTD.device)
        # Sum the gradients of each token first: same order of additions, hence same bits, as with a separate matrix.
        tokens_U, place_N = ids_BT.flatten().unique(return_inverse=True)
        rows_UD = grad_BTD.new_zeros((len(tokens_U), grad_BTD.shape[-1]))
        rows_UD.index_add_(0, place_N, grad_BTD.flatten(0, 1))
        total_VD.index_add_(0, tokens_U, rows_UD.to(total_VD.dtype))
        return total_VD, None, None

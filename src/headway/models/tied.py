"""A matrix that is embedding and vocabulary projection at once, and gets one gradient of its size instead of three.

The gradient of the projection is as large as the matrix, and that of the embedding has a row for each token of the
batch, few of all. PyTorch makes another such matrix of them, and a third for the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class TiedGradient:
    """Where, in one pass, the gradient of the projection waits for that of the embedding, which comes last.

    To be made first of all in a pass: the room for the gradient, which is the largest block of all, is then where it
    was in the step before, and not in a new place because a part of that one was given to something small.

    Args:
        weight_VD: The matrix.
    """

    def __init__(self, weight_VD: torch.Tensor) -> None:
        self._room_VD: torch.Tensor | None = torch.empty_like(weight_VD, dtype=torch.float32)
        self._projection_VD: torch.Tensor | None = None

    def room(self) -> torch.Tensor | None:
        """For the projection's gradient, fp32, (V, D), once."""
        room_VD, self._room_VD = self._room_VD, None
        return room_VD

    def put(self, gradient_VD: torch.Tensor) -> None:
        """Leave the gradient of the projection, which will be written to."""
        self._projection_VD = gradient_VD

    def take(self) -> torch.Tensor | None:
        """That gradient, once."""
        gradient_VD, self._projection_VD = self._projection_VD, None
        return gradient_VD


def takes_one_gradient(weight_VD: torch.Tensor) -> bool:
    """Whether `tied_embedding` may be used for a tied matrix: tried out on the CPU only, and not while a compiler looks
    on, which does not see what waits."""
    return (
        weight_VD.device.type == "cpu"
        and type(weight_VD) in (torch.Tensor, torch.nn.Parameter)
        and weight_VD.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def tied_embedding(ids_BT: torch.Tensor, weight_VD: torch.Tensor, tied: TiedGradient) -> torch.Tensor:
    """`F.embedding` whose backward pass gives the weight both gradients, with the bits of their sum.

    Args:
        ids_BT: int64, (B, T).
        weight_VD: (V, D).
        tied: In which the projection leaves its gradient before.

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
        if total_VD is None:  # nobody has asked for the loss's gradient
            total_VD = torch.zeros_like(ctx.like, device=grad_BTD.device)
        # A row's own sum comes first, as when it was a matrix of its own.
        tokens_U, place_N = ids_BT.flatten().unique(return_inverse=True)
        rows_UD = grad_BTD.new_zeros((len(tokens_U), grad_BTD.shape[-1]))
        rows_UD.index_add_(0, place_N, grad_BTD.flatten(0, 1))
        total_VD.index_add_(0, tokens_U, rows_UD.to(total_VD.dtype))
        return total_VD, None, None

"""Vocabulary projection and cross-entropy in one, without the logits of a whole batch.

The logits of a batch are the largest tensor of a small model's training step. Here they exist for one chunk of rows at
a time: their gradient is computed while they are there, in the forward pass, and only the gradients of the rows and of
the projection are kept (Hsu et al. 2024, "Liger Kernel", section 3.2, fused linear cross-entropy).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from headway.core.types import IGNORE_TARGET
from headway.models.facts import default_chunk_rows


def linear_cross_entropy(
    x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, *, chunk_rows: int | None = None
) -> torch.Tensor:
    """Sum over rows of `cross_entropy(x @ weight.T, target)`, differentiable once in `x` and `weight`.

    Under autocast the products are in its dtype; softmax, loss and the sum of the weight's gradient are in fp32.

    Args:
        x_ND: Rows, fp32, bf16 or fp16, (N, D).
        weight_VD: Vocabulary projection, fp32 or bf16, (V, D).
        targets_N: int64, (N,); rows with `IGNORE_TARGET` take no part.
        chunk_rows: Most rows whose logits are alive at a time; by device and vocabulary when not given.

    Returns:
        fp32 scalar, in nats.
    """
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):
        x_ND = x_ND.to(torch.get_autocast_dtype(device))
    rows = chunk_rows or default_chunk_rows(device, weight_VD.shape[0])
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        loss: torch.Tensor = _LinearCrossEntropy.apply(x_ND, weight_VD, targets_N, rows)  # type: ignore[no-untyped-call]
        return loss
    w_VD = weight_VD.to(x_ND.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    for x_CD, targets_C in zip(torch.split(x_ND, rows), torch.split(targets_N, rows), strict=True):
        loss += _chunk_loss(x_CD @ w_VD.t(), targets_C)[0]
    return loss


def _chunk_loss(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of a chunk and what its gradient needs; `logits_CV` may be overwritten.

    Returns:
        The summed loss; fp32 `exp(logits - max)`, (C, V); its sum over the vocabulary, (C, 1); the index of each row's
        target, (C, 1), 0 where it is to be ignored.
    """
    valid_C1 = (targets_C != IGNORE_TARGET).unsqueeze(1)
    index_C1 = targets_C.unsqueeze(1).where(valid_C1, 0)
    logits_CV = logits_CV.float()
    target_C1 = logits_CV.gather(1, index_C1)
    max_C1 = logits_CV.amax(1, keepdim=True)
    exp_CV = logits_CV.sub_(max_C1).exp_()
    sum_C1 = exp_CV.sum(1, keepdim=True)
    loss = (sum_C1.log() + max_C1 - target_C1).where(valid_C1, 0.0).sum()
    return loss, exp_CV, sum_C1, index_C1


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk_rows: int
    ) -> torch.Tensor:
        w_VD = weight_VD.to(x_ND.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        x_grads = []
        w_grad_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        for x_CD, targets_C in zip(torch.split(x_ND, chunk_rows), torch.split(targets_N, chunk_rows), strict=True):
            chunk_loss, exp_CV, sum_C1, index_C1 = _chunk_loss(x_CD @ w_VD.t(), targets_C)
            loss = loss + chunk_loss
            if x_ND.dtype == torch.float16:  # the sum over a large vocabulary has no place in it
                exp_CV, sum_C1 = exp_CV.div_(sum_C1), torch.ones_like(sum_C1)
            # The gradient of the logits is exp / sum - one_hot(target). Dividing the short sides of both products
            # by the sum saves a pass over the long one.
            one_hot_C = exp_CV.gather(1, index_C1).sub_(sum_C1).squeeze(1)
            row_C = torch.arange(exp_CV.shape[0], device=exp_CV.device)
            grad_CV = exp_CV.to(x_ND.dtype).index_put_((row_C, index_C1.squeeze(1)), one_hot_C.to(x_ND.dtype))
            scale_C1 = (targets_C != IGNORE_TARGET).unsqueeze(1) / sum_C1
            x_grads.append((grad_CV @ w_VD).mul_(scale_C1))
            scaled_CD = (x_CD * scale_C1).to(x_ND.dtype)
            if x_ND.dtype == torch.float32:
                w_grad_VD.addmm_(grad_CV.t(), scaled_CD)
            else:
                w_grad_VD.add_(grad_CV.t() @ scaled_CD)
        ctx.save_for_backward(torch.cat(x_grads), w_grad_VD)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x_grad_ND, w_grad_VD = ctx.saved_tensors
        x_grad_ND = x_grad_ND * grad_output.to(x_grad_ND.dtype)
        return x_grad_ND, (w_grad_VD * grad_output).to(ctx.weight_dtype), None, None

"""Vocabulary projection and cross-entropy in one function, without the logits of a whole batch.

The logits of a batch are the largest tensor of a small model's training step. Here they exist for one chunk of rows at
a time. The forward pass also computes their gradient, and keeps only the gradients of the rows and of the projection
(Hsu et al. 2024, "Liger Kernel", section 3.2, fused linear cross-entropy).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from headway.core.startup.dtensors import is_dtensor
from headway.core.types import IGNORE_TARGET
from headway.models.layers.tied import TiedGradient
from headway.models.loss_chunks import ADDED_ROWS, PRODUCT_ROWS, default_chunk_rows

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Rows of logits that a CPU converts at a time where that costs nothing: the fp32 copies stay in its cache.
_CACHED_ROWS = 32


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the vocabulary projection on this worker; workers have equally many, in order of rank."""

    first: int
    """Index of the first row."""
    group: dist.ProcessGroup
    """The workers that share the vocabulary."""


def vocabulary_parallel_cross_entropy(
    x_BTD: DTensor,
    weight_VD: torch.Tensor,
    targets_BT: torch.Tensor,
    *,
    chunk_rows: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute `linear_cross_entropy` where workers share the vocabulary and the positions of `x`.

    Every worker gets the same loss. Logits stay local; maxima, sums and the logits of targets travel (Shoeybi et al.
    2019, section 3).

    Args:
        x_BTD: On a one-dimensional mesh, sharded by position.
        weight_VD: A `DTensor` of the same mesh, sharded into equal parts of the vocabulary.
        targets_BT: Targets of all positions.
        chunk_rows, softcap: As in `linear_cross_entropy`.
    """
    from torch.distributed.tensor import Partial, Replicate

    assert is_dtensor(weight_VD)
    group = weight_VD.device_mesh.get_group()
    if torch.is_autocast_enabled(x_BTD.device.type):  # before the gather
        x_BTD = cast("DTensor", x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type)))
    # Each worker's logits give a partial gradient of `x`; the backward pass sums them and splits the sum by position.
    whole_BTD = x_BTD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rows_VD = weight_VD.to_local()
    part = VocabularyPart(dist.get_rank(group) * rows_VD.shape[0], group)
    return linear_cross_entropy(
        whole_BTD.flatten(0, 1), rows_VD, targets_BT.flatten(), chunk_rows=chunk_rows, part=part, softcap=softcap
    )


def linear_cross_entropy(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    chunk_rows: int | None = None,
    part: VocabularyPart | None = None,
    compiled: bool = False,
    tied: TiedGradient | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Sum `cross_entropy(x @ weight.T, target)` over rows; differentiable once in `x` and `weight`.

    Under autocast the products are in its dtype; softmax, loss and the sum of the weight's gradient are in fp32.

    Args:
        x_ND: Rows, fp32, bf16 or fp16, (N, D).
        weight_VD: Vocabulary projection, fp32 or bf16, (V, D).
        targets_N: int64, (N,); rows with `IGNORE_TARGET` are left out.
        chunk_rows: Most rows whose logits exist at a time; chosen by device and vocabulary by default.
        part: The part of the vocabulary in `weight_VD`, if other workers have the rest. All of them get the same rows
            and the same loss. The gradient of `x_ND` covers this worker's logits and must be summed over workers.
        compiled: Compile the code between the products, if the whole vocabulary is local.
        tied: Stores the gradient of the weight, which then gets none from here (`tied_embedding`).
        softcap: Logits z become c tanh(z / c), with this c.

    Returns:
        fp32 scalar, in nats.
    """
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):
        x_ND = x_ND.to(torch.get_autocast_dtype(device))
    compiled = compiled and part is None
    in_16_bits = compiled and x_ND.element_size() == 2
    rows = chunk_rows or default_chunk_rows(device, weight_VD.shape[0], in_16_bits)
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x_ND, weight_VD, targets_N, tied, rows, part, compiled, softcap
        )
        return loss
    w_VD = weight_VD.to(x_ND.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    # fp32 logits are overwritten in place. With shared vocabularies each call is a collective, so calls should be few.
    at_once = _CACHED_ROWS if device == "cpu" and part is None and x_ND.element_size() == 2 else rows
    for x_CD, targets_C in zip(torch.split(x_ND, rows), torch.split(targets_N, rows), strict=True):
        logits_CV = x_CD @ w_VD.t()
        for logits_RV, targets_R in zip(logits_CV.split(at_once), targets_C.split(at_once), strict=True):
            loss += _chunk_loss(_capped(logits_RV, softcap), targets_R, part).loss
        del logits_CV  # before those of the next chunk
    return loss


def _capped(logits_CV: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Cap logits, in fp32, if they are capped."""
    return logits_CV if softcap is None else (logits_CV.float() / softcap).tanh_().mul_(softcap)


class _ChunkLoss(NamedTuple):
    """The loss of a chunk, and the tensors that its gradient needs."""

    loss: torch.Tensor
    """Summed over rows."""
    exp_CV: torch.Tensor
    """fp32 `exp(logits - max)`."""
    sum_C1: torch.Tensor
    """Its sum over the whole vocabulary."""
    index_C1: torch.Tensor
    """Index of each row's target; 0 if the target is not local."""
    here_C1: torch.Tensor
    """Whether the target is local: neither ignored nor on another worker."""


def _chunk_loss(logits_CV: torch.Tensor, targets_C: torch.Tensor, part: VocabularyPart | None) -> _ChunkLoss:
    """Compute the loss of a chunk of logits; may overwrite `logits_CV`."""
    valid_C1 = (targets_C != IGNORE_TARGET).unsqueeze(1)
    local_C1 = targets_C.unsqueeze(1)
    here_C1 = valid_C1
    if part is not None:
        local_C1 = local_C1 - part.first
        here_C1 = valid_C1 & (local_C1 >= 0) & (local_C1 < logits_CV.shape[1])
    index_C1 = local_C1.where(here_C1, 0)
    logits_CV = logits_CV.float()
    target_C1 = logits_CV.gather(1, index_C1)
    max_C1 = logits_CV.amax(1, keepdim=True)
    if part is not None:
        dist.all_reduce(max_C1, dist.ReduceOp.MAX, group=part.group)
    exp_CV = logits_CV.sub_(max_C1).exp_()
    sum_C1 = exp_CV.sum(1, keepdim=True)
    if part is not None:
        both_C2 = torch.cat((sum_C1, target_C1.where(here_C1, 0.0)), dim=1)
        dist.all_reduce(both_C2, group=part.group)
        sum_C1, target_C1 = both_C2.split(1, dim=1)
    loss = (sum_C1.log() + max_C1 - target_C1).where(valid_C1, 0.0).sum()
    return _ChunkLoss(loss, exp_CV, sum_C1, index_C1, here_C1)


def _loss_and_gradients(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    tied: TiedGradient | None,
    *,
    chunk_rows: int,
    part: VocabularyPart | None,
    compiled: bool,
    softcap: float | None,
    frozen: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the loss, its gradient in `x` in the dtype of `x`, and its gradient in the weight in fp32.

    A `frozen` weight gets no gradient, which would take as much memory as the weight.
    """
    w_VD = weight_VD.to(x_ND.dtype)
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    x_grad_ND = torch.empty_like(x_ND)
    w_grad_VD = None if tied is None else tied.room()
    if w_grad_VD is None and not frozen:
        w_grad_VD = torch.empty(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
    parts = (torch.split(t, chunk_rows) for t in (x_ND, targets_N, x_grad_ND))
    for index, (x_CD, targets_C, x_grad_CD) in enumerate(zip(*parts, strict=True)):
        if compiled:
            chunk_loss, grad_CV, scale_C1 = _compiled_chunk_gradient(x_CD @ w_VD.t(), targets_C, softcap)
        else:
            # The 16-bit logits are freed here: where Dynamo has its hook, a caller keeps what it passes on.
            chunk_loss, grad_CV, scale_C1 = _chunk_gradient(
                (x_CD @ w_VD.t()).float(), targets_C, part, softcap, x_ND.dtype
            )
        loss = loss + chunk_loss
        x_grad_CD.copy_((grad_CV @ w_VD).mul_(scale_C1))
        if w_grad_VD is not None:
            scaled_CD = (x_CD * scale_C1).to(x_ND.dtype)
            _accumulate(w_grad_VD, grad_CV, scaled_CD, is_first=index == 0)
        del grad_CV  # before the logits of the next chunk
    return loss, x_grad_ND, w_grad_VD


def _accumulate(total_VD: torch.Tensor, grad_CV: torch.Tensor, x_CD: torch.Tensor, is_first: bool) -> None:
    """Add a chunk's part of the projection's gradient.

    The first part overwrites instead of being added to zeros, which saves two passes over a matrix as large as the
    weight.
    """
    if x_CD.dtype == torch.float32:
        total_VD.addmm_(grad_CV.t(), x_CD, beta=int(not is_first))
    elif total_VD.device.type != "cpu":
        take = total_VD.copy_ if is_first else total_VD.add_
        take(grad_CV.t() @ x_CD)
    else:
        # A CPU adds 16-bit to 32-bit values eight times as fast in blocks that it converts to fp32 in its cache.
        for total_RD, grad_CR in zip(total_VD.split(PRODUCT_ROWS), grad_CV.split(PRODUCT_ROWS, 1), strict=True):
            part_RD = grad_CR.t() @ x_CD
            if is_first:
                total_RD.copy_(part_RD)
                continue
            for some_RD, more_RD in zip(total_RD.split(ADDED_ROWS), part_RD.split(ADDED_ROWS), strict=True):
                some_RD.add_(more_RD.float())


def _chunk_gradient(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    part: VocabularyPart | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the loss, and two factors of the gradient of the logits: (C, V) in `dtype`, and (C, 1).

    That gradient is exp / sum - one_hot(target). Dividing the short sides of both products by the sum saves a pass over
    the long one. If logits are capped, it is multiplied by the slope of the cap, 1 - tanh^2. May overwrite `logits_CV`.
    """
    logits_CV = _capped(logits_CV.float(), softcap)
    slope_CV = None if softcap is None else 1 - (logits_CV / softcap).square()
    loss, exp_CV, sum_C1, index_C1, here_C1 = _chunk_loss(logits_CV, targets_C, part)
    if dtype == torch.float16:  # its range is too small for the sum over a large vocabulary
        exp_CV = exp_CV.div_(sum_C1)
        sum_C1 = torch.ones_like(sum_C1)
    one_hot_C = exp_CV.gather(1, index_C1).sub_(sum_C1.where(here_C1, 0.0)).squeeze(1)
    row_C = torch.arange(exp_CV.shape[0], device=exp_CV.device)
    grad_CV = exp_CV.to(dtype).index_put_((row_C, index_C1.squeeze(1)), one_hot_C.to(dtype))
    if slope_CV is not None:
        grad_CV = (grad_CV * slope_CV).to(dtype)
    return loss, grad_CV, (targets_C != IGNORE_TARGET).unsqueeze(1) / sum_C1


def _compiled_chunk_gradient(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `_chunk_gradient` for the whole vocabulary with compiled code; overwrites `logits_CV`.

    A CPU takes a few rows at a time, so that their exponentials stay in its cache and need no memory.
    """
    if logits_CV.device.type != "cpu":
        whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _compiled(_chunk_gradient)(
            logits_CV, targets_C, None, softcap, logits_CV.dtype
        )
        return whole
    losses = []
    scales = []
    for logits_RV, targets_R in zip(logits_CV.split(_CACHED_ROWS), targets_C.split(_CACHED_ROWS), strict=True):
        loss, scale_R1 = _compiled(_overwrite)(logits_RV, targets_R, softcap)
        losses.append(loss)
        scales.append(scale_R1)
    return torch.stack(losses).sum(), logits_CV, torch.cat(scales)


def _overwrite(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_chunk_gradient` in place of its logits."""
    loss, grad_CV, scale_C1 = _chunk_gradient(logits_CV, targets_C, None, softcap, logits_CV.dtype)
    logits_CV.copy_(grad_CV)
    return loss, scale_C1


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        tied: TiedGradient | None,
        *further: Any,
    ) -> torch.Tensor:
        rows, part, compiled, softcap = further
        loss, *gradients = _loss_and_gradients(
            x_ND,
            weight_VD,
            targets_N,
            tied,
            chunk_rows=rows,
            part=part,
            compiled=compiled,
            softcap=softcap,
            frozen=not (ctx.needs_input_grad[1] or tied),
        )
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight_VD.dtype
        ctx.tied = tied
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad_ND, w_grad_VD = ctx.saved_tensors
        x_grad_ND = x_grad_ND * grad_output.to(x_grad_ND.dtype)
        if w_grad_VD is None:
            return x_grad_ND, *[None] * 7
        # It is as large as the weight, so scale it in place, unless `retain_graph` keeps it for another backward pass.
        if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
            w_grad_VD = w_grad_VD * grad_output
        else:
            w_grad_VD.mul_(grad_output)
        w_grad_VD = w_grad_VD.to(ctx.weight_dtype)
        if ctx.tied is not None:
            ctx.tied.put(w_grad_VD)
        return x_grad_ND, None if ctx.tied else w_grad_VD, *[None] * 6

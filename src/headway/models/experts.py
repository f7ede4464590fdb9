"""The experts of a mixture: tokens sorted by expert, one product per expert, and back again. No token is dropped.

Suffixes: N tokens, K experts of a token, P = N * K pairs of token and expert, R rows of the sorted buffer (P, and
padding where the kernel wants it), E experts, D width of the residual stream, F inner width of an expert.

Nothing here adds up in an order that depends on timing: a pair has a place of its own in the buffer, and what the K
experts of a token give, forward and backward, is summed along a dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headway.core.dtensors import is_dtensor
from headway.models.dispatch import plan_transfer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: The grouped kernels read 16 bytes at a time, also along the rows of a group when weights get their gradient.
_ALIGNED_ROWS = 8


class Places(NamedTuple):
    """Where every pair of a token and one of its experts lies in a buffer that is sorted by expert."""

    row_NK: torch.Tensor
    """int64, all different."""
    ends_E: torch.Tensor
    """int64: the row behind the last one of each expert, padding included."""
    rows: int
    """Rows of the buffer; those behind the last end are never read."""


def sorted_places(experts_NK: torch.Tensor, counts_E: torch.Tensor, align: int = 1) -> Places:
    """Places in the order of experts, and within an expert in the order of tokens.

    Args:
        experts_NK: int64, the experts of each token.
        counts_E: int64, how often each expert occurs there.
        align: Every expert's rows are padded to a multiple of this. The size of the buffer does not depend on the
            counts, so that nothing has to wait for them.
    """
    pairs, experts = experts_NK.numel(), counts_E.numel()
    order_P = experts_NK.flatten().argsort(stable=True)
    # A grouped product may leave the gradient of an expert without any rows as it finds it.
    least = align if align > 1 else 0
    padded_E = ((counts_E + (align - 1)) // align * align).clamp(min=least)
    ends_E = padded_E.cumsum(0)
    # How much further back than without padding the rows of each expert begin.
    shift_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    sorted_P = torch.arange(pairs, device=order_P.device) + shift_E[experts_NK.flatten()[order_P]]
    row_P = torch.empty_like(order_P).index_copy_(0, order_P, sorted_P)
    rows = pairs + least * experts
    return Places(row_P.view(experts_NK.shape), ends_E, -(-rows // align) * align)


class _Spread(torch.autograd.Function):
    """Copies every token to the rows of its experts."""

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, row_NK: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(row_NK)
        x_RD = x_ND.new_zeros(rows, x_ND.shape[1])
        for row_N in row_NK.unbind(1):
            x_RD.index_copy_(0, row_N, x_ND)
        return x_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_NK,) = ctx.saved_tensors
        return grad_RD[row_NK].sum(1), None, None


class _Collect(torch.autograd.Function):
    """Brings the rows back to their tokens, (N, K, D)."""

    @staticmethod
    def forward(ctx: Any, y_RD: torch.Tensor, row_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_NK)
        ctx.rows = y_RD.shape[0]
        return y_RD[row_NK]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NKD: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row_NK,) = ctx.saved_tensors
        grad_RD = grad_NKD.new_zeros(ctx.rows, grad_NKD.shape[2])
        return grad_RD.index_copy_(0, row_NK.flatten(), grad_NKD.flatten(0, 1)), None


def spread(x_ND: torch.Tensor, places: Places) -> torch.Tensor:
    """Tokens in the rows of their experts, (R, D); padding is zero."""
    x_RD: torch.Tensor = _Spread.apply(x_ND, places.row_NK, places.rows)  # type: ignore[no-untyped-call]
    return x_RD


def collect(y_RD: torch.Tensor, places: Places) -> torch.Tensor:
    """The inverse: what each expert of a token gave, (N, K, D)."""
    y_NKD: torch.Tensor = _Collect.apply(y_RD, places.row_NK)  # type: ignore[no-untyped-call]
    return y_NKD


class Experts(nn.Module):
    """Feed-forward layers (SwiGLU) of equal size, their matrices stacked."""

    def __init__(self, experts: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        # Rows of a matrix: the gate's, then the linear branch's.
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn_dim))
        self.workers: ProcessGroup | None = None
        """Who shares the experts, each with an equal run of them; None when all are here."""

    def forward(self, x_ND: torch.Tensor, experts_NK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """What each expert of a token makes of it.

        Args:
            x_ND: Tokens.
            experts_NK: int64, the experts of each.
            counts_E: int64, how many tokens each expert has.

        Returns:
            (N, K, D), in the dtype of the products.
        """
        device = x_ND.device.type
        gate_up, down = _here(self.gate_up), _here(self.down)
        if torch.is_autocast_enabled(device):
            # Here rather than in every product: what is sorted is then half as large.
            dtype = torch.get_autocast_dtype(device)
            x_ND, gate_up, down = x_ND.to(dtype), gate_up.to(dtype), down.to(dtype)
        if self.workers is None:
            return compute_experts(x_ND, experts_NK, counts_E, gate_up, down)
        places = sorted_places(experts_NK, counts_E)
        transfer = plan_transfer(counts_E, self.workers)
        x_SD = transfer.there(spread(x_ND, places))
        y_S1D = compute_experts(x_SD, transfer.expert_S1, transfer.counts_L, gate_up, down)
        return collect(transfer.back(y_S1D.squeeze(1)), places)


def _here(weight: torch.Tensor) -> torch.Tensor:
    """The experts that this worker has."""
    return weight.to_local() if is_dtensor(weight) else weight


def compute_experts(
    x_ND: torch.Tensor, experts_NK: torch.Tensor, counts_E: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """As `Experts.forward`, by matrices (E, 2 F, D) and (E, D, F) that are all here."""
    grouped = has_grouped_kernel(x_ND, gate_up, down)
    places = sorted_places(experts_NK, counts_E, _ALIGNED_ROWS if grouped else 1)
    x_RD = spread(x_ND, places)
    product = grouped_product if grouped else looped_product
    gate_RF, up_RF = product(x_RD, gate_up, places.ends_E).chunk(2, dim=-1)
    return collect(product(F.silu(gate_RF) * up_RF, down, places.ends_E), places)


def has_grouped_kernel(x_ND: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether `grouped_product` takes these: bf16 on an NVIDIA GPU, with sides that are multiples of 16 bytes."""
    sides = [side for weight in weights for side in weight.shape[1:]]
    return (
        x_ND.device.type == "cuda"
        and x_ND.dtype == torch.bfloat16
        and all(weight.dtype == torch.bfloat16 for weight in weights)
        and all(side % 8 == 0 for side in sides)
        and hasattr(F, "grouped_mm")
    )


def grouped_product(x_RD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Rows times the transposed matrix of their expert, (R, F), in one kernel that reads the ends on the device."""
    # The kernel's gradient has no use for strides of zero, as of an expanded gradient; `chunk` and `silu` give none.
    return F.grouped_mm(x_RD, weight_EFD.transpose(-2, -1), offs=ends_E.to(torch.int32))


def looped_product(x_RD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The same, one product after the other; waits for the ends."""
    ends = ends_E.tolist()
    groups = [x_RD[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.cat([F.linear(x, w) for x, w in zip(groups, weight_EFD.unbind(0), strict=True)])

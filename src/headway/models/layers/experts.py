"""The experts of a mixture: sort tokens by expert, run one product per expert, and sort back. No token is dropped.

Tensor-name suffixes: N tokens, K experts of a token, P = N * K pairs of token and expert, R rows of the sorted buffer
(P plus the padding that the kernel needs), E experts, D width of the residual stream, F inner width of an expert.

No sum depends on timing: each pair has its own row in the buffer, and the results of a token's K experts, forward and
backward, are summed along a dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from headway.core.startup.dtensors import is_dtensor
from headway.models.sharding.dispatch import plan_transfer

#: The grouped kernels read 16 bytes at a time, in the weight gradient also along the rows of a group.
_ALIGNED_ROWS = 8


class Places(NamedTuple):
    """The row of every pair of token and expert in a buffer sorted by expert."""

    row_NK: torch.Tensor
    """int64, all different."""
    ends_E: torch.Tensor
    """int64: the end of each expert's rows (exclusive), padding included."""
    rows: int
    """Rows of the buffer; rows after the last end are never read."""


def sorted_places(experts_NK: torch.Tensor, counts_E: torch.Tensor, align: int = 1) -> Places:
    """Assign rows in expert order, and within an expert in token order.

    Args:
        experts_NK: int64, the experts of each token.
        counts_E: int64, how often each expert occurs in `experts_NK`.
        align: Pad every expert's rows to a multiple of this. The buffer size does not depend on the counts, so the
            host need not wait for them.
    """
    pairs = experts_NK.numel()
    experts = counts_E.numel()
    order_P = experts_NK.flatten().argsort(stable=True)
    # The grouped product leaves the gradient of an expert uninitialised if the expert has no rows.
    least = align if align > 1 else 0
    padded_E = ((counts_E + (align - 1)) // align * align).clamp(min=least)
    ends_E = padded_E.cumsum(0)
    # Offset that padding adds to the first row of each expert.
    shift_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    sorted_P = torch.arange(pairs, device=order_P.device) + shift_E[experts_NK.flatten()[order_P]]
    row_P = torch.empty_like(order_P).index_copy_(0, order_P, sorted_P)
    rows = pairs + least * experts
    return Places(row_P.view(experts_NK.shape), ends_E, -(-rows // align) * align)


class _Spread(torch.autograd.Function):
    """Copy every token to the rows of its experts."""

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
    """Gather the rows of each token, (N, K, D)."""

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
    """Copy tokens into the rows of their experts, (R, D); padding is zero."""
    x_RD: torch.Tensor = _Spread.apply(x_ND, places.row_NK, places.rows)  # type: ignore[no-untyped-call]
    return x_RD


def collect(y_RD: torch.Tensor, places: Places) -> torch.Tensor:
    """Gather the output of each expert of a token, (N, K, D); the inverse of `spread`."""
    y_NKD: torch.Tensor = _Collect.apply(y_RD, places.row_NK)  # type: ignore[no-untyped-call]
    return y_NKD


class Experts(nn.Module):
    """Feed-forward layers (SwiGLU) of equal size with stacked matrices."""

    def __init__(self, experts: int, dim: int, ffn_dim: int) -> None:
        super().__init__()
        # Rows of each matrix: first the gate, then the linear branch.
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn_dim))
        self.workers: ProcessGroup | None = None
        """The workers that share the experts, each with an equal contiguous range; None if all are local."""

    def forward(self, x_ND: torch.Tensor, experts_NK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Compute the output of each expert of a token.

        Args:
            x_ND: Tokens.
            experts_NK: int64, the experts of each token.
            counts_E: int64, the number of tokens of each expert.

        Returns:
            (N, K, D), in the dtype of the products.
        """
        device = x_ND.device.type
        gate_up = _here(self.gate_up)
        down = _here(self.down)
        if torch.is_autocast_enabled(device):
            # Cast before sorting rather than in every product: the sorted buffers are then half as large.
            dtype = torch.get_autocast_dtype(device)
            x_ND = x_ND.to(dtype)
            gate_up = gate_up.to(dtype)
            down = down.to(dtype)
        if self.workers is None:
            return compute_experts(x_ND, experts_NK, counts_E, gate_up, down)
        places = sorted_places(experts_NK, counts_E)
        transfer = plan_transfer(counts_E, self.workers)
        x_SD = transfer.there(spread(x_ND, places))
        y_S1D = compute_experts(x_SD, transfer.expert_S1, transfer.counts_L, gate_up, down)
        return collect(transfer.back(y_S1D.squeeze(1)), places)


def _here(weight: torch.Tensor) -> torch.Tensor:
    """Return the local experts of a weight."""
    return weight.to_local() if is_dtensor(weight) else weight


def compute_experts(
    x_ND: torch.Tensor, experts_NK: torch.Tensor, counts_E: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute `Experts.forward` with local matrices (E, 2 F, D) and (E, D, F)."""
    grouped = has_grouped_kernel(x_ND, gate_up, down)
    places = sorted_places(experts_NK, counts_E, _ALIGNED_ROWS if grouped else 1)
    x_RD = spread(x_ND, places)
    product = grouped_product if grouped else looped_product
    gate_RF, up_RF = product(x_RD, gate_up, places.ends_E).chunk(2, dim=-1)
    return collect(product(F.silu(gate_RF) * up_RF, down, places.ends_E), places)


def has_grouped_kernel(x_ND: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Return whether `grouped_product` supports the tensors.

    It needs bf16 on an NVIDIA GPU, with sides that are multiples of 16 bytes.
    """
    sides = [side for weight in weights for side in weight.shape[1:]]
    return (
        x_ND.device.type == "cuda"
        and x_ND.dtype == torch.bfloat16
        and all(weight.dtype == torch.bfloat16 for weight in weights)
        and all(side % 8 == 0 for side in sides)
        and hasattr(F, "grouped_mm")
    )


def grouped_product(x_RD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply rows by the transposed matrix of their expert, (R, F), in one kernel.

    The kernel reads the ends on the device.
    """
    # The kernel's backward does not support zero strides, such as those of an expanded gradient; `chunk` and `silu`
    # produce none.
    return F.grouped_mm(x_RD, weight_EFD.transpose(-2, -1), offs=ends_E.to(torch.int32))


def looped_product(x_RD: torch.Tensor, weight_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Compute `grouped_product` one expert at a time; waits for the device."""
    ends = ends_E.tolist()
    groups = [x_RD[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.cat([F.linear(x, w) for x, w in zip(groups, weight_EFD.unbind(0), strict=True)])

"""Frozen matrices in 4 or 8 bits, below adapters that are trained (Dettmers et al. 2023, "QLoRA").

A matrix is stored as codes and scales, and restored for each product in the type of the product. Only what enters a
product is restored: neither pass keeps it. Codes and scales are frozen parameters, so that strategies shard them like
any other weight.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

#: Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (Dettmers et al. 2023, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
#: Values that share a scale in nf4.
NF4_BLOCK = 64
_INT8_MOST = 127

Kind = Literal["int8", "nf4"]


def can_quantize(weight: torch.Tensor, kind: Kind) -> bool:
    """Return whether a matrix can be stored in a kind: nf4 needs rows of whole blocks."""
    return weight.ndim == 2 and (kind == "int8" or weight.shape[1] % NF4_BLOCK == 0)


def quantize(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a matrix, (rows, ...) each; the largest value of a block is kept exactly in nf4.

    Args:
        weight: (rows, columns).
        kind: `int8`: a scale for each row. `nf4`: two codes in a byte, a scale for `NF4_BLOCK` values.
    """
    values = weight.detach().float()
    if kind == "int8":
        scales = (values.abs().amax(1, keepdim=True) / _INT8_MOST).clamp_min(1e-30)
        return (values / scales).round().to(torch.int8), scales
    blocks = values.unflatten(1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(2).clamp_min(1e-30)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    codes = torch.bucketize(blocks / scales.unsqueeze(2), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    pairs = codes.to(torch.uint8).flatten(1).unflatten(1, (-1, 2))
    return pairs[..., 0] * 16 + pairs[..., 1], scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix of codes and scales in a type, (rows, columns)."""
    if kind == "int8":
        return codes.to(dtype) * scales.to(dtype)
    levels = torch.tensor(NF4_LEVELS, device=codes.device, dtype=dtype)
    pairs = torch.stack((codes >> 4, codes & 15), dim=2).flatten(1)
    blocks: torch.Tensor = levels[pairs.int()].unflatten(1, (-1, NF4_BLOCK)) * scales.to(dtype).unsqueeze(2)
    return blocks.flatten(1)


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose matrix is stored in few bits."""

    def __init__(self, layer: nn.Linear, kind: Kind) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.kind = kind
        codes, scales = quantize(layer.weight, kind)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> torch.Tensor:
        """The restored matrix, for code that looks at it."""
        return dequantize(self.codes, self.scales, self.kind, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the input and the restored matrix."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y: torch.Tensor = _product(x.to(dtype), self.codes, self.scales, self.kind)
        return y if self.bias is None else y + self.bias.to(dtype)


# Operators of their own, not an autograd function: torch.compile otherwise sees the restored matrices, and may keep
# them for the backward pass.
@torch.library.custom_op("headway::frozen_product", mutates_args=())
def _product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Multiply rows by a matrix that is restored for it."""
    return F.linear(x, dequantize(codes, scales, kind, x.dtype))  # type: ignore[arg-type]


@torch.library.custom_op("headway::frozen_product_backward", mutates_args=())
def _product_backward(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the gradient of the rows."""
    return gradient @ dequantize(codes, scales, kind, gradient.dtype)  # type: ignore[arg-type]


@_product.register_fake
def _(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@_product_backward.register_fake
def _(gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    columns = codes.shape[1] if kind == "int8" else 2 * codes.shape[1]
    return gradient.new_empty(*gradient.shape[:-1], columns)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, codes, scales, ctx.kind = inputs
    ctx.save_for_backward(codes, scales)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    codes, scales = ctx.saved_tensors
    return _product_backward(gradient, codes, scales, ctx.kind), None, None, None


_product.register_autograd(_backward, setup_context=_keep)

"""One decoder layer and its parts.

Tensor-name suffixes are those of `headway.models.decoder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headway.models.attention import Positions, attend, rotate
from headway.models.cache import KVCache
from headway.models.moe import MixtureOfExperts
from headway.models.recompute import selective_contexts
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, (..., dim), in the dtype of the weight; compute the mean square in fp32."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.group, self.head_dim = shape.queries_per_group, shape.head_dim
        self.dropout = config.dropout
        # Output rows are ordered by key-value group: the group's query heads, then its key, then its value. Cutting
        # the rows into equal contiguous parts therefore keeps groups whole, as tensor parallelism needs.
        self.qkv = nn.Linear(shape.dim, shape.kv_heads * (shape.queries_per_group + 2) * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        # -1: the number of key-value groups on this worker.
        qkv = self.qkv(x_BTD).view(B, T, -1, self.group + 2, self.head_dim)
        q_BTKGH, k_BTK1H, v_BTK1H = qkv.split([self.group, 1, 1], dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGH, k_BTK1H = self.q_norm(q_BTKGH), self.k_norm(k_BTK1H)
        q = rotate(q_BTKGH, positions.cos, positions.sin).to(qkv.dtype).flatten(2, 3)
        k = rotate(k_BTK1H, positions.cos, positions.sin).to(qkv.dtype).squeeze(3)
        v = v_BTK1H.squeeze(3)
        if torch.is_grad_enabled() and (self.q_norm is None or self.q_norm.weight.dtype != qkv.dtype):
            v = v.contiguous()  # a view would also keep the queries and keys from before the rotation alive
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        y_BTD = self.output(attend(q, k, v, positions).flatten(2))
        return F.dropout(y_BTD, self.dropout, self.training)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, equation 6) with both input projections in one product."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.dropout = config.dropout
        # Output rows come in groups: rows of the gate, then as many rows of the linear branch. Cutting the rows into
        # equal contiguous parts therefore keeps each gate with its partner, as tensor parallelism needs.
        self.width = shape.ffn_dim // shape.ffn_groups
        self.gate_up_groups = nn.Linear(shape.dim, 2 * shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_groups(x_BTD).unflatten(-1, (-1, 2, self.width)).unbind(-2)
        return F.dropout(self.down((F.silu(gate) * up).flatten(-2)), self.dropout, self.training)


def _for_products(x: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype that autocast would use in the next product, so that workers exchange the smaller tensor."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Layer(nn.Module):
    """A decoder layer: attention, then feed-forward or experts, each pre-normalised and added to the residual."""

    def __init__(self, config: ModelConfig, shape: Shape, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, config.norm_eps)
        self.attention = Attention(config, shape, index)
        self.feed_forward_norm = RMSNorm(shape.dim, config.norm_eps)
        self.is_dense = index < shape.dense_layers
        self.feed_forward = FeedForward(config, shape) if self.is_dense else MixtureOfExperts(config, shape)
        self.activation_checkpointing: Literal["none", "selective", "full"] = "none"

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        if self.activation_checkpointing == "none" or cache is not None or not torch.is_grad_enabled():
            return self._compute(x_BTD, positions, cache)
        # torch.compile does not accept a `context_fn` that does nothing.
        selective = self.activation_checkpointing == "selective"
        options: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
        y_BTD: torch.Tensor = checkpoint(self._compute, x_BTD, positions, cache, use_reentrant=False, **options)
        return y_BTD

    def _compute(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(_for_products(self.attention_norm(x_BTD)), positions, cache)
        normalised_BTD = _for_products(self.feed_forward_norm(x_BTD))
        counted = () if self.is_dense else (positions.counted,)
        y_BTD: torch.Tensor = x_BTD + self.feed_forward(normalised_BTD, *counted)
        return y_BTD

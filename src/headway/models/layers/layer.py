"""One decoder layer and its parts.

Tensor-name suffixes are those of `headway.models.decoder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headway.config import ModelConfig
from headway.config.sections.architecture import ATTENTION, FEED_FORWARD, MAMBA
from headway.core.types import Checkpointing, Fusion
from headway.models.layers.attention import Positions, attend
from headway.models.layers.cache import KVCache, RowCaches
from headway.models.layers.mamba import Mamba
from headway.models.layers.moe import MixtureOfExperts
from headway.models.layers.rope import rotate
from headway.models.recompute import in_host_memory, selective_contexts
from headway.models.shape import Shape


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, (..., dim), in the dtype of the weight; compute the mean square in fp32."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class LayerNorm1P(nn.Module):
    """LayerNorm (Ba et al. 2016) whose gain is 1 plus its weight, so that a weight of 0 changes nothing.

    Weight decay therefore pulls the gain to 1 instead of 0. It is the norm of Nemotron.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, (..., dim), in the dtype of the weight."""
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight + 1, self.bias, self.eps)


class RMSNorm1P(nn.Module):
    """RMSNorm whose gain is 1 plus its weight, so that a weight of 0 changes nothing. It is the norm of Gemma."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, (..., dim), in the dtype of the weight; bf16 would round a gain close to 1, so it is fp32."""
        gain = self.weight.float() + 1
        return F.rms_norm(x.float(), gain.shape, gain, self.eps).to(self.weight.dtype)


#: Elements in a row of 16 bits each that PyTorch's loops on a CPU need to take several at a time (two registers).
_VECTOR_ROW = 64

Norm: TypeAlias = RMSNorm | RMSNorm1P | LayerNorm1P
_NORMS: dict[str, type[Norm]] = {"rmsnorm": RMSNorm, "rmsnorm1p": RMSNorm1P, "layernorm1p": LayerNorm1P}


def make_norm(config: ModelConfig, dim: int) -> Norm:
    """Create a norm of the residual stream."""
    return _NORMS[config.norm](dim, config.norm_eps)


def _make_head_norm(config: ModelConfig, heads: int, head_dim: int) -> RMSNorm | RMSNorm1P | None:
    """Create the norm of so many heads of queries or keys, if there is one."""
    if not config.qk_norm:
        return None
    norm = RMSNorm1P if config.norm == "rmsnorm1p" else RMSNorm
    return norm(head_dim if config.qk_norm_over == "head" else heads * head_dim, config.norm_eps)


def _fused(layer: nn.Linear, sizes: tuple[int, ...]) -> dict[nn.Parameter, Fusion]:
    """Return the parameters of a layer whose outputs come in groups, with so many of each projection in each."""
    return dict.fromkeys(layer.parameters(), Fusion(sizes, layer.weight.shape[0] // sum(sizes)))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.group = shape.queries_per_group
        self.head_dim = shape.head_dim
        self.dropout = config.dropout
        # Output rows are ordered by key-value group: the group's query heads, then its key, then its value. Cutting
        # the rows into equal contiguous parts therefore keeps groups whole, as tensor parallelism needs.
        rows = shape.kv_heads * (shape.queries_per_group + 2) * shape.head_dim
        self.qkv = nn.Linear(shape.dim, rows, bias=config.qkv_bias)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=config.output_bias)
        self.q_norm = _make_head_norm(config, shape.heads, shape.head_dim)
        self.k_norm = _make_head_norm(config, shape.kv_heads, shape.head_dim)
        self.norms_heads = config.qk_norm_over == "head"
        self.softcap = config.attention_softcap
        # Kernels scale scores by 1 / sqrt(head_dim).
        scale = config.attention_scale
        self.query_scale = 1.0 if scale is None else scale * math.sqrt(shape.head_dim)

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the rows of queries, keys and values (`headway.core.model_protocol.FusesProjections`)."""
        sizes = (self.group * self.head_dim, self.head_dim, self.head_dim)
        return _fused(self.qkv, sizes)

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | RowCaches | None) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        # -1: the number of key-value groups on this worker.
        qkv = self.qkv(x_BTD).view(B, T, -1, self.group + 2, self.head_dim)
        q_BTKGH, k_BTK1H, v_BTK1H = qkv.split([self.group, 1, 1], dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_heads:
                q_BTKGH = self.q_norm(q_BTKGH)
                k_BTK1H = self.k_norm(k_BTK1H)
            else:
                q_BTKGH = self.q_norm(q_BTKGH.flatten(2)).view(q_BTKGH.shape)
                k_BTK1H = self.k_norm(k_BTK1H.flatten(2)).view(k_BTK1H.shape)
        q_BTKGH = rotate(q_BTKGH, positions.cos, positions.sin)
        if self.query_scale != 1.0:
            q_BTKGH = q_BTKGH * self.query_scale
        q = q_BTKGH.to(qkv.dtype).flatten(2, 3)
        k = rotate(k_BTK1H, positions.cos, positions.sin).to(qkv.dtype).squeeze(3)
        v = v_BTK1H.squeeze(3)
        if torch.is_grad_enabled() and (self.q_norm is None or self.q_norm.weight.dtype != qkv.dtype):
            # A view would also keep the queries and keys from before the rotation alive; turned keys are no view.
            k = k.contiguous()
            v = v.contiguous()
        if cache is None:
            y = attend(q, k, v, positions, self.softcap)
        else:
            y = cache.attend(self.layer, q, k, v, positions=positions, softcap=self.softcap)
        y_BTD = self.output(y.flatten(2))
        return F.dropout(y_BTD, self.dropout, self.training)


class FeedForward(nn.Module):
    """SwiGLU or GEGLU (Shazeer 2020, equation 6) with both input projections in one product."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.is_gelu = config.activation == "geglu"
        # Output rows come in groups: rows of the gate, then as many rows of the linear branch. Cutting the rows into
        # equal contiguous parts therefore keeps each gate with its partner, as tensor parallelism needs.
        self.width = shape.ffn_dim // shape.ffn_groups
        self.gate_up_groups = nn.Linear(shape.dim, 2 * shape.ffn_dim, bias=config.ffn_bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=config.ffn_bias)

    def fusions(self) -> dict[nn.Parameter, Fusion]:
        """Return the rows of the gate and of the linear branch (`headway.core.model_protocol.FusesProjections`)."""
        return _fused(self.gate_up_groups, (self.width, self.width))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_groups(x_BTD).unflatten(-1, (-1, 2, self.width)).unbind(-2)
        if self.width < _VECTOR_ROW and _loops_in_16_bits(gate):
            # Without gaps between rows, activations take an eighth of the time that one element at a time takes.
            gate = gate.contiguous()
            up = up.contiguous()
        gate = F.gelu(gate, approximate="tanh") if self.is_gelu else F.silu(gate)
        return F.dropout(self.down((gate * up).flatten(-2)), self.dropout, self.training)


def _loops_in_16_bits(x: torch.Tensor) -> bool:
    """Return whether PyTorch's loops on a CPU compute with `x`, in 16 bits; compiled code has loops of its own."""
    return x.device.type == "cpu" and x.element_size() == 2 and not torch.compiler.is_compiling()


class SquaredReLU(nn.Module):
    """Feed-forward layer without a gate, whose activation is the square of a ReLU (So et al. 2021, section 4.1)."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=config.ffn_bias)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=config.ffn_bias)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.relu(self.up(x_BTD)).square()), self.dropout, self.training)


def make_feed_forward(config: ModelConfig, shape: Shape) -> FeedForward | SquaredReLU:
    """Create a feed-forward layer without experts."""
    return (SquaredReLU if config.activation == "relu2" else FeedForward)(config, shape)


def _for_products(x: torch.Tensor) -> torch.Tensor:
    """Cast to the dtype that autocast would use in the next product, so that workers exchange the smaller tensor."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class Layer(nn.Module):
    """A decoder layer: attention, then feed-forward or experts, each normalised and added to the residual.

    A layer of a pattern (`headway.config.sections.architecture`) has one of these parts only, or a Mamba-2 mixer.
    """

    def __init__(self, config: ModelConfig, shape: Shape, index: int) -> None:
        super().__init__()
        kind = shape.pattern[index] if shape.pattern else ATTENTION + FEED_FORWARD
        self.residual_scale = config.residual_scale
        self.mamba: Mamba | None = None
        self.attention: Attention | None = None
        self.feed_forward: FeedForward | SquaredReLU | MixtureOfExperts | None = None
        self.attention_norm: Norm | None = None
        self.attention_post_norm: Norm | None = None
        self.feed_forward_norm: Norm | None = None
        self.feed_forward_post_norm: Norm | None = None
        if MAMBA in kind:
            self.mamba_norm, self.mamba = make_norm(config, shape.dim), Mamba(config, shape, index)
        if ATTENTION in kind:
            if config.pre_norms:
                self.attention_norm = make_norm(config, shape.dim)
            self.attention = Attention(config, shape, index)
            if config.post_norms:
                self.attention_post_norm = make_norm(config, shape.dim)
        self.is_dense = index < shape.dense_layers
        if FEED_FORWARD in kind:
            if config.pre_norms:
                self.feed_forward_norm = make_norm(config, shape.dim)
            dense = make_feed_forward(config, shape) if self.is_dense else None
            self.feed_forward = dense or MixtureOfExperts(config, shape)
            if config.post_norms:
                self.feed_forward_post_norm = make_norm(config, shape.dim)
        self.activation_checkpointing: Checkpointing = "none"

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | RowCaches | None) -> torch.Tensor:
        if self.activation_checkpointing == "none" or cache is not None or not torch.is_grad_enabled():
            return self._compute(x_BTD, positions, cache)
        # torch.compile does not accept a `context_fn` that does nothing.
        selective = self.activation_checkpointing == "selective"
        options: dict[str, Any] = {"context_fn": selective_contexts} if selective else {}
        recomputed: Callable[..., torch.Tensor] = partial(checkpoint, self._compute, use_reentrant=False, **options)
        if self.activation_checkpointing == "offload":
            with in_host_memory(x_BTD):
                return recomputed(x_BTD, positions, cache)
        return recomputed(x_BTD, positions, cache)

    def _compute(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | RowCaches | None) -> torch.Tensor:
        if self.mamba is not None:
            y_BTD = self.mamba(_input(x_BTD, self.mamba_norm), positions, cache)
            x_BTD = x_BTD + self._output(y_BTD, None)
        if self.attention is not None:
            y_BTD = self.attention(_input(x_BTD, self.attention_norm), positions, cache)
            x_BTD = x_BTD + self._output(y_BTD, self.attention_post_norm)
        if self.feed_forward is not None:
            counted = () if self.is_dense else (positions.counted,)
            y_BTD = self.feed_forward(_input(x_BTD, self.feed_forward_norm), *counted)
            x_BTD = x_BTD + self._output(y_BTD, self.feed_forward_post_norm)
        return x_BTD

    def _output(self, y_BTD: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Normalise and scale the output of a part, as it is added to the residual stream."""
        y_BTD = y_BTD if norm is None else norm(y_BTD)
        return y_BTD if self.residual_scale == 1.0 else y_BTD * self.residual_scale


def _input(x_BTD: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """Normalise the residual stream for a part of the layer, in the dtype of its products."""
    return _for_products(x_BTD if norm is None else norm(x_BTD))

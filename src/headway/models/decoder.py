"""The native decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU (Touvron et al. 2023, section 2.2).

Suffixes of tensor names: B rows, T positions, S positions with those in the cache, D width of the residual stream,
K key-value heads, G query heads per key-value head, H width of a head, F inner width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headway.core.errors import ConfigError
from headway.core.random import derive_seed
from headway.models.cache import KVCache
from headway.models.loss import linear_cross_entropy
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig


class Positions(NamedTuple):
    """Where the tokens of a forward pass are, and what they may look at; the same for every layer."""

    cos: torch.Tensor
    """(T, 1, 1, H), from `rotary_tables`."""
    sin: torch.Tensor
    mask_TS: torch.Tensor | None
    """From `attention_mask`, as `is_causal`."""
    is_causal: bool


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x`, (..., dim), in the dtype of the weight; the mean square is computed in fp32 in any case."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kv_heads, self.group, self.head_dim = shape.kv_heads, shape.queries_per_group, shape.head_dim
        self.dropout = config.dropout
        # Output rows come by key-value group: that group's query heads, then its key, then its value. A contiguous
        # cut of the rows into equal parts therefore cuts by group, which is what tensor parallelism needs.
        self.qkv = nn.Linear(shape.dim, shape.kv_heads * (shape.queries_per_group + 2) * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, self.kv_heads, self.group + 2, self.head_dim)
        q_BTKGH, k_BTK1H, v_BTK1H = qkv.split([self.group, 1, 1], dim=3)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTKGH, k_BTK1H = self.q_norm(q_BTKGH), self.k_norm(k_BTK1H)
        q = rotate(q_BTKGH, positions.cos, positions.sin).to(qkv.dtype).flatten(2, 3)
        k = rotate(k_BTK1H, positions.cos, positions.sin).to(qkv.dtype).squeeze(3)
        v = v_BTK1H.squeeze(3)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        shared = self.group > 1
        if shared and not kernels_share_heads(q.device.type, q.dtype, positions.mask_TS is not None):
            k, v = (x.unsqueeze(3).expand(-1, -1, -1, self.group, -1).flatten(2, 3) for x in (k, v))
            shared = False
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=positions.mask_TS,
            is_causal=positions.is_causal,
            enable_gqa=shared,
        )
        y_BTD = self.output(y.transpose(1, 2).reshape(B, T, -1))
        return F.dropout(y_BTD, self.dropout, self.training)


def kernels_share_heads(device: str, dtype: torch.dtype, masked: bool) -> bool:
    """Whether a fast attention kernel takes fewer key-value heads than query heads.

    On CUDA only flash attention does, and it takes neither fp32 nor a mask. The kernel that does would be passed over
    for the one that writes out all scores; repeating the heads for it is far cheaper than that.
    """
    return device == "cpu" or (dtype != torch.float32 and not masked)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, equation 6) with both input projections in one product."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        super().__init__()
        self.dropout = config.dropout
        # Rows: the gate's, then the linear branch's. Tensor parallelism cuts the view (2, ffn_dim, dim) along ffn_dim.
        self.gate_up = nn.Linear(shape.dim, 2 * shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gate_BTF, up_BTF = self.gate_up(x_BTD).chunk(2, dim=-1)
        return F.dropout(self.down(F.silu(gate_BTF) * up_BTF), self.dropout, self.training)


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each normalised before and added to the residual stream."""

    def __init__(self, config: ModelConfig, shape: Shape, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, config.norm_eps)
        self.attention = Attention(config, shape, index)
        self.feed_forward_norm = RMSNorm(shape.dim, config.norm_eps)
        self.feed_forward = FeedForward(config, shape)

    def forward(self, x_BTD: torch.Tensor, positions: Positions, cache: KVCache | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, cache)
        y_BTD: torch.Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return y_BTD


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, section 3.4.2), pairing element i with i + head_dim / 2 as Hugging Face does.

    Args:
        x: (B, T, K, G, H).
        cos, sin: From `rotary_tables`, (T, 1, 1, H).

    Returns:
        As `x`, in the wider of the dtypes.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Decoder(nn.Module):
    """A decoder-only transformer of the Llama family.

    Works with fp32 weights, with fp32 weights under `torch.autocast`, and with bf16 weights. There is no position at
    which it waits for the device, and no graph break under `torch.compile`.

    Args:
        config: Complete, that is with `vocab_size` (see `headway.models.build.complete`).

    Raises:
        ConfigError: the config's shape is not complete.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.shape = shape = Shape.of(config)
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Layer(config, shape, index) for index in range(shape.layers))
        self.norm = RMSNorm(shape.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.activation_checkpointing = False
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.make_rotary_tables()

    def make_rotary_tables(self) -> None:
        """Compute the rotary tables, which are no part of the state, on the device of the weights."""
        device = self.embedding.weight.device
        cos, sin = rotary_tables(self.config.max_sequence_length, self.shape.head_dim, self.config.rope_theta)
        self.cos, self.sin = cos.to(device), sin.to(device)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """First weights, a pure function of the seed and each parameter's name, on any device.

        Normal with `init_std`; the two output projections of a layer have 1/sqrt(2 * layers) of it, so that the
        residual stream does not grow with depth (Radford et al. 2019, section 2.3). Norms are 1. The rotary tables
        are made anew, so a module from the meta device is ready after `to_empty` and this.
        """
        residual_std = self.config.init_std / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
            std = residual_std if name.endswith(("attention.output.weight", "down.weight")) else self.config.init_std
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        self.make_rotary_tables()

    def set_activation_checkpointing(self, mode: Literal["none", "full"]) -> None:
        """`full`: keep only each layer's input and compute the layer again in the backward pass."""
        self.activation_checkpointing = mode == "full"

    def new_cache(self, rows: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `rows` sequences of up to `capacity` positions; `dtype` is the weights' by default."""
        weight = self.embedding.weight
        return KVCache(self.shape, rows, capacity, dtype or weight.dtype, weight.device)

    def forward(
        self, ids_BT: torch.Tensor, targets_BT: torch.Tensor | None = None, cache: KVCache | None = None
    ) -> torch.Tensor:
        """Loss or logits.

        Args:
            ids_BT: int64 token ids, (B, T).
            targets_BT: int64, (B, T); `IGNORE_TARGET` takes no part.
            cache: Positions seen before, which `ids_BT` continue; they are added to it.

        Returns:
            With targets the fp32 scalar sum of the cross-entropies in nats, without them logits (B, T, V).

        Raises:
            ConfigError: the sequence is longer than `max_sequence_length`.
        """
        x_BTD = self.hidden_states(ids_BT, cache)
        if targets_BT is None:
            return self.logits(x_BTD)
        return linear_cross_entropy(x_BTD.flatten(0, 1), self.projection, targets_BT.flatten())

    @property
    def projection(self) -> torch.Tensor:
        """The vocabulary projection, (V, D); the embedding's own matrix when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of final hidden states."""
        return F.linear(x_BTD, self.projection)

    def hidden_states(self, ids_BT: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Normalised output of the last layer, (B, T, D); arguments and errors as in `forward`."""
        T = ids_BT.shape[1]
        start = 0 if cache is None else cache.length
        limit = self.config.max_sequence_length if cache is None else cache.capacity
        if start + T > min(limit, self.config.max_sequence_length):
            raise ConfigError(
                f"a sequence of {start + T} tokens does not fit: the limit is {limit}",
                where="model.max_sequence_length" if cache is None else "the capacity of the key-value cache",
                fix="use shorter sequences, or raise the limit",
            )
        mask_TS, is_causal = attention_mask(start, T, self.config.sliding_window, ids_BT.device)
        positions = Positions(self.cos[start : start + T], self.sin[start : start + T], mask_TS, is_causal)
        x_BTD: torch.Tensor = self.embedding(ids_BT)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled() and cache is None:
                x_BTD = checkpoint(layer, x_BTD, positions, cache, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, positions, cache)
        if cache is not None:
            cache.length += T
        x_BTD = self.norm(x_BTD)
        return x_BTD  # noqa: RET504 (the name gives the type)


def rotary_tables(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for `rotate` at positions 0 to `length`, fp32, each (length, 1, 1, head_dim), on the CPU.

    The first half of the sines is negated: the rotation of a pair (a, b) is (a cos - b sin, b cos + a sin).
    """
    with torch.device("cpu"):
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[:, None, None, :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def attention_mask(
    start: int, length: int, window: int | None, device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """How queries at positions `start` to `start + length` may look at keys from position 0 on.

    Returns:
        A mask (length, start + length), true where a query sees a key, or None where none is needed; and whether
        attention is plainly causal, which kernels do faster than a mask.
    """
    end = start + length
    windowed = window is not None and end > window
    if start == 0 and not windowed:
        return None, True
    if length == 1 and not windowed:
        return None, False
    query_T1 = torch.arange(start, end, device=device)[:, None]
    key_S = torch.arange(end, device=device)
    mask_TS = key_S <= query_T1
    if window is not None:
        mask_TS &= key_S > query_T1 - window
    return mask_TS, False

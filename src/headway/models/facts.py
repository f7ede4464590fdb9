"""Sizes and costs of a decoder by arithmetic, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    total: int
    """All of them; a tied matrix counts once."""
    embedding: int
    """Embedding table and, where it is a matrix of its own, the vocabulary projection."""
    non_embedding: int
    """The layers and the last norm (N of Kaplan et al. 2020, section 2.1)."""
    active: int
    """All but the experts that a token does not go to."""


def count_parameters(config: ModelConfig, vocab_size: int | None = None) -> ParameterCounts:
    """Parameters of the decoder that `config` describes.

    Args:
        config: A shape; `vocab_size` may be open when the argument gives it.
        vocab_size: Takes the place of `config.vocab_size`.

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, vocab_size)
    attention = shape.dim * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    norms = 2 * shape.dim + (2 * shape.head_dim if config.qk_norm else 0)
    expert, mixtures = 3 * shape.dim * shape.expert_ffn_dim, shape.layers - shape.dense_layers
    mixture = shape.experts * (expert + shape.dim) + 3 * shape.dim * shape.shared_ffn_dim
    dense = 3 * shape.dim * shape.ffn_dim
    feed_forward = shape.dense_layers * dense + mixtures * mixture
    non_embedding = shape.layers * (attention + norms) + feed_forward + shape.dim
    embedding = shape.vocab_size * shape.dim * (1 if config.tie_embeddings else 2)
    idle = mixtures * (shape.experts - shape.experts_per_token) * expert
    total = non_embedding + embedding
    return ParameterCounts(total, embedding, non_embedding, total - idle)


def flops_per_token(config: ModelConfig, sequence_length: int, vocab_size: int | None = None) -> float:
    """FLOPs to train on one token, forward and backward: 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B).

    N is the number of active parameters with the vocabulary projection and without an untied embedding table, whose
    look-up is no product. L, H, Q are layers, heads and head width; T is the sequence length, or the sliding window
    where that is shorter. As in the paper, attention counts every pair of positions, also those that the causal mask
    hides.

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, vocab_size)
    counts = count_parameters(config, vocab_size)
    multiplied = counts.active - counts.embedding + shape.vocab_size * shape.dim
    attended = min(sequence_length, config.sliding_window or sequence_length)
    return float(6 * multiplied + 12 * shape.layers * shape.heads * shape.head_dim * attended)


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int = 2) -> int:
    """Bytes that one position takes in the key-value cache (bf16 unless `bytes_per_element` says otherwise).

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, config.vocab_size or 1)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_per_element

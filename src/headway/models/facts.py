"""Sizes and costs of a decoder, computed without building it."""

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
    """All parameters; a tied matrix counts once."""
    embedding: int
    """The embedding table and, unless tied, the vocabulary projection."""
    non_embedding: int
    """The layers and the last norm (N of Kaplan et al. 2020, section 2.1)."""
    active: int
    """Parameters that compute a token: all but the experts that it is not routed to."""


def parameter_shapes(config: ModelConfig, vocab_size: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter in the decoder's order; a tied matrix appears once.

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, vocab_size)
    width, head, vocabulary = (shape.dim,), (shape.head_dim,), (shape.vocab_size, shape.dim)
    mixture: dict[str, tuple[int, ...]] = {
        "feed_forward.router.weight": (shape.experts, shape.dim),
        "feed_forward.experts.gate_up": (shape.experts, 2 * shape.expert_ffn_dim, shape.dim),
        "feed_forward.experts.down": (shape.experts, shape.dim, shape.expert_ffn_dim),
    }
    if shape.shared_ffn_dim:
        mixture |= {
            "feed_forward.shared.gate_up.weight": (2 * shape.shared_ffn_dim, shape.dim),
            "feed_forward.shared.down.weight": (shape.dim, shape.shared_ffn_dim),
        }
    dense: dict[str, tuple[int, ...]] = {
        "feed_forward.gate_up_groups.weight": (2 * shape.ffn_dim, shape.dim),
        "feed_forward.down.weight": (shape.dim, shape.ffn_dim),
    }
    attention: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": width,
        "attention.qkv.weight": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.dim),
        "attention.output.weight": (shape.dim, shape.heads * shape.head_dim),
        **({"attention.q_norm.weight": head, "attention.k_norm.weight": head} if config.qk_norm else {}),
        "feed_forward_norm.weight": width,
    }
    layers = {
        f"layers.{index}.{name}": size
        for index in range(shape.layers)
        for name, size in (attention | (dense if index < shape.dense_layers else mixture)).items()
    }
    head_weight = {} if config.tie_embeddings else {"head.weight": vocabulary}
    return {"embedding.weight": vocabulary, **layers, "norm.weight": width, **head_weight}


def count_parameters(config: ModelConfig, vocab_size: int | None = None) -> ParameterCounts:
    """Count the parameters of the decoder that `config` describes.

    Args:
        config: A shape; `vocab_size` may be unset if the argument gives it.
        vocab_size: Overrides `config.vocab_size`.

    Raises:
        ConfigError: the shape is not complete.
    """
    if config.implementation == "transformers":
        from headway.models.hub.sizes import sizes_of

        total, embedding, active = sizes_of(config)
        return ParameterCounts(total, embedding, total - embedding, active)
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
    """Compute the training FLOPs per token, forward and backward.

    The formula is 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B). N is the number of active parameters,
    including the vocabulary projection and excluding an untied embedding table, whose look-up is no product. L, H, Q
    are layers, heads and head width; T is the sequence length, or the sliding window if shorter. As in the paper,
    attention counts every pair of positions, including those that the causal mask hides.

    Raises:
        ConfigError: the shape is not complete.
    """
    if config.implementation == "transformers":
        from headway.models.hub.sizes import flops_of

        return flops_of(config, sequence_length)
    shape = Shape.of(config, vocab_size)
    counts = count_parameters(config, vocab_size)
    multiplied = counts.active - counts.embedding + shape.vocab_size * shape.dim
    attended = min(sequence_length, config.sliding_window or sequence_length)
    return float(6 * multiplied + 12 * shape.layers * shape.heads * shape.head_dim * attended)


@dataclass(frozen=True)
class PartCosts:
    """Training FLOPs per token of the parts of a decoder that pipeline stages are made of (see `flops_per_token`)."""

    embedding: float
    """Belongs to the stage of the first layer; a look-up is no product."""
    layers: tuple[float, ...]
    """One entry per layer; stages may be cut between any two."""
    head: float
    """The vocabulary projection, in the stage of the last layer."""


def part_costs(config: ModelConfig, sequence_length: int, vocab_size: int | None = None) -> PartCosts:
    """Compute the costs of the parts that pipeline stages are made of.

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, vocab_size)
    head = 6.0 * shape.vocab_size * shape.dim
    layers = flops_per_token(config, sequence_length, vocab_size) - head
    return PartCosts(0.0, (layers / shape.layers,) * shape.layers, head)


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int = 2) -> int:
    """Compute the bytes of one position in the key-value cache (in bf16 by default).

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, config.vocab_size or 1)
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * bytes_per_element

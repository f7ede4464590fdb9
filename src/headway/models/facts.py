"""Sizes and costs of a decoder, computed without building it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from headway.config import ModelConfig
from headway.config.sections.architecture import ATTENTION, FEED_FORWARD, MAMBA, SLIDING
from headway.models.shape import Shape


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
    vocabulary = (shape.vocab_size, shape.dim)
    width: dict[str, tuple[int, ...]] = {f"norm.{kind}": (shape.dim,) for kind in norm_parts(config)}
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = {
        **(_named("attention_", width) if config.pre_norms else {}),
        **_named("attention.qkv.", _linear(rows, shape.dim, config.qkv_bias)),
        **_named("attention.output.", _linear(shape.dim, shape.heads * shape.head_dim, config.output_bias)),
        **(_head_norms(config, shape) if config.qk_norm else {}),
        **(_named("attention_post_", width) if config.post_norms else {}),
    }
    first, up = ("up.", 1) if config.activation == "relu2" else ("gate_up_groups.", 2)
    dense = {
        **_named(f"feed_forward.{first}", _linear(up * shape.ffn_dim, shape.dim, config.ffn_bias)),
        **_named("feed_forward.down.", _linear(shape.dim, shape.ffn_dim, config.ffn_bias)),
    }
    last = _named("feed_forward_post_", width) if config.post_norms else {}
    norm = _named("feed_forward_", width) if config.pre_norms else {}
    parts = {
        ATTENTION: attention,
        FEED_FORWARD: norm | dense | last,
        MAMBA: _named("mamba_", width) | _mamba(config, shape),
    }
    mixture = norm | _mixture(shape) | last
    layers = {
        f"layers.{index}.{name}": size
        for index in range(shape.layers)
        for name, size in (
            parts[shape.pattern[index]]
            if shape.pattern
            else attention | (parts[FEED_FORWARD] if index < shape.dense_layers else mixture)
        ).items()
    }
    head_weight = {} if config.tie_embeddings else {"head.weight": vocabulary}
    return {"embedding.weight": vocabulary, **layers, **width, **head_weight}


def norm_parts(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the parameters of a norm of the residual stream."""
    return ("weight", "bias") if config.norm == "layernorm1p" else ("weight",)


def _head_norms(config: ModelConfig, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the norms of queries and keys."""
    over_heads = config.qk_norm_over == "projection"
    queries, keys = (count if over_heads else 1 for count in (shape.heads, shape.kv_heads))
    return {
        "attention.q_norm.weight": (queries * shape.head_dim,),
        "attention.k_norm.weight": (keys * shape.head_dim,),
    }


def _named(prefix: str, sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix + name: size for name, size in sizes.items()}


def _linear(rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {"weight": (rows, columns), **({"bias": (rows,)} if bias else {})}


def _mixture(shape: Shape) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "feed_forward.router.weight": (shape.experts, shape.dim),
        "feed_forward.experts.gate_up": (shape.experts, 2 * shape.expert_ffn_dim, shape.dim),
        "feed_forward.experts.down": (shape.experts, shape.dim, shape.expert_ffn_dim),
    }
    if shape.shared_ffn_dim:
        sizes["feed_forward.shared.gate_up.weight"] = (2 * shape.shared_ffn_dim, shape.dim)
        sizes["feed_forward.shared.down.weight"] = (shape.dim, shape.shared_ffn_dim)
    return sizes


def _mamba(config: ModelConfig, shape: Shape) -> dict[str, tuple[int, ...]]:
    sizes = config.mamba
    if sizes is None:
        return {}
    return {
        "mamba.conv_weight": (sizes.channels, 1, sizes.conv_width),
        **({"mamba.conv_bias": (sizes.channels,)} if sizes.conv_bias else {}),
        "mamba.step_bias": (sizes.heads,),
        "mamba.log_decay": (sizes.heads,),
        "mamba.skip": (sizes.heads,),
        "mamba.norm_weight": (sizes.width,),
        "mamba.input.weight": (sizes.projected, shape.dim),
        "mamba.output.weight": (shape.dim, sizes.width),
    }


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
    ends = ("embedding.weight", "head.weight")
    sizes = {name: prod(size) for name, size in parameter_shapes(config, vocab_size).items()}
    total = sum(sizes.values())
    embedding = sum(sizes.get(name, 0) for name in ends)
    idle_experts = (shape.layers - shape.dense_layers) * (shape.experts - shape.experts_per_token)
    idle = idle_experts * 3 * shape.dim * shape.expert_ffn_dim
    return ParameterCounts(total, embedding, total - embedding, total - idle)


def flops_per_token(config: ModelConfig, sequence_length: int, vocab_size: int | None = None) -> float:
    """Compute the training FLOPs per token, forward and backward.

    The formula is 6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B). N is the number of active parameters,
    including the vocabulary projection and excluding an untied embedding table, whose look-up is no product. L, H, Q
    are layers, heads and head width; T is the sequence length, or in sliding layers the window if shorter. As in the
    paper, attention counts every pair of positions, including those that the causal mask hides. The state space of a
    Mamba-2 layer is counted as it is computed: in every chunk of Q positions scores of each group and their products
    with the inputs of H heads, P wide, and the products that add to and read states of width N, which is forward
    2 Q (G N + H P) + 4 H P N per position (Dao & Gu 2024, section 6).

    Raises:
        ConfigError: the shape is not complete.
    """
    if config.implementation == "transformers":
        from headway.models.hub.sizes import flops_of

        return flops_of(config, sequence_length)
    shape = Shape.of(config, vocab_size)
    counts = count_parameters(config, vocab_size)
    multiplied = counts.active - counts.embedding + shape.vocab_size * shape.dim
    attended = sum(attended_keys(config, index, sequence_length) for index in shape.attention_layers)
    attention = attention_flops(shape, attended)
    return float(6 * multiplied + attention + len(shape.mamba_layers) * scan_flops(config, sequence_length))


def attended_keys(config: ModelConfig, layer: int, sequence_length: int) -> int:
    """Return the most keys that a query of a layer sees."""
    pattern = config.attention_pattern
    window = config.sliding_window
    if window is None or (pattern is not None and pattern[layer] != SLIDING):
        return sequence_length
    return min(sequence_length, window)


def attention_flops(shape: Shape, attended: float) -> float:
    """Return the training FLOPs per token of the scores of one layer, for so many keys of each query."""
    return 12 * shape.heads * shape.head_dim * attended


def scan_flops(config: ModelConfig, sequence_length: int) -> float:
    """Return the training FLOPs per token of the state space of one Mamba-2 layer; 0 if the model has none."""
    sizes = config.mamba
    if sizes is None:
        return 0.0
    width = sizes.width
    chunk = min(sizes.chunk, sequence_length)
    forward = 2 * chunk * (sizes.groups * sizes.state_dim + width) + 4 * width * sizes.state_dim
    return 3.0 * forward


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
    if not shape.pattern:
        own = [0.0] * shape.layers  # what distinguishes layers
        if config.attention_pattern:
            attended = [attended_keys(config, index, sequence_length) for index in range(shape.layers)]
            own = [attention_flops(shape, keys) for keys in attended]
        alike = (layers - sum(own)) / shape.layers
        return PartCosts(0.0, tuple(alike + cost for cost in own), head)
    costs = [0.0] * shape.layers
    for name, size in parameter_shapes(config, vocab_size).items():
        if name.startswith("layers."):
            costs[int(name.split(".")[1])] += 6 * prod(size)
    for index in shape.attention_layers:
        costs[index] += attention_flops(shape, attended_keys(config, index, sequence_length))
    for index in shape.mamba_layers:
        costs[index] += scan_flops(config, sequence_length)
    return PartCosts(0.0, tuple(costs), head)


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int = 2) -> int:
    """Compute the bytes of one position in the key-value cache (in bf16 by default).

    Raises:
        ConfigError: the shape is not complete.
    """
    shape = Shape.of(config, config.vocab_size or 1)
    return 2 * len(shape.attention_layers) * shape.kv_heads * shape.head_dim * bytes_per_element

"""Sections and checks of the decoder's variations: experts, scaled rotary embeddings, Mamba-2 and other layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import Config
    from headway.config.sections.model import ModelConfig

#: Letters of `model.layer_pattern` (Waleffe et al. 2024, section 2.2; as in Nemotron-H).
MAMBA, ATTENTION, FEED_FORWARD = "M", "*", "-"
#: Letters of `model.attention_pattern`.
FULL, SLIDING, NO_ROTARY = "F", "S", "N"


class RopeScaling(Section):
    """Rotary frequencies for longer sequences than the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear`: all frequencies divided by `factor` (Chen et al. 2023, equation 4). `llama3`: only low ones, as in
    Llama 3.1. `yarn`: those with few turns, and attention scaled (Peng et al. 2023, sections 3.2 and 3.4)."""
    factor: Annotated[float, Field(ge=1.0)]
    """Factor by which the context is extended."""
    original_length: PositiveInt | None = None
    """Length that the model was first trained on; needed by `llama3` and `yarn`."""
    low_frequency_factor: Annotated[float, Field(gt=0.0)] = 1.0
    """`llama3` divides frequencies with fewer turns than this over `original_length`."""
    high_frequency_factor: Annotated[float, Field(gt=0.0)] = 4.0
    """`llama3` keeps frequencies with more turns than this; between the two it interpolates."""
    beta_fast: Annotated[float, Field(gt=0.0)] = 32.0
    """`yarn` keeps frequencies with more turns than this over `original_length`."""
    beta_slow: Annotated[float, Field(gt=0.0)] = 1.0
    """`yarn` divides frequencies with fewer turns than this."""
    attention_factor: Annotated[float, Field(gt=0.0)] | None = None
    """`yarn` multiplies queries and keys by it; 0.1 ln(factor) + 1 when not given."""
    truncate: bool = True
    """`yarn` rounds the ends of its ramp to whole frequencies."""


class MambaConfig(Section):
    """Sizes of Mamba-2 layers (Dao & Gu 2024, section 7)."""

    heads: PositiveInt
    """Heads of a layer, each with a state of its own."""
    head_dim: PositiveInt = 64
    """Width of a head."""
    state_dim: PositiveInt = 128
    """Width of the state of each element of a head."""
    groups: PositiveInt = 8
    """Groups of heads that share their input and output vectors B and C."""
    conv_width: Annotated[int, Field(ge=2)] = 4
    """Positions that the convolution before the state space sees."""
    chunk: PositiveInt = 128
    """Positions that are computed by matrix products; states are passed between such chunks."""
    min_step: Annotated[float, Field(ge=0.0)] = 0.001
    """Smallest step of a state; also the smallest of the first steps."""
    max_step: Annotated[float, Field(gt=0.0)] = 0.1
    """Largest of the first steps, which are log-uniform."""
    conv_bias: bool = True
    """Bias of the convolution."""

    @property
    def width(self) -> int:
        """Combined width of the heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs of the heads, then B and C of each group."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Output rows of the first projection: a gate, the channels of the convolution, and a step per head."""
        return self.width + self.channels + self.heads


#: Why tensor parallelism does not divide a model whose `qk_norm` is over the projection.
UNDIVIDED_NORM = "the norms of queries and keys are over all heads, which are not divided between workers"


def pattern_layers(pattern: str, letter: str) -> list[int]:
    """Return the places of one kind of layer in a pattern."""
    return [place for place, found in enumerate(pattern) if found == letter]


def experts_problem(model: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    """Return the problem with the experts of a shape and its keys; None if they are valid."""
    if model.experts is None:
        open_keys = {"expert_ffn_dim": model.expert_ffn_dim, "shared_experts": model.shared_experts}
        changed = {
            "normalize_router_weights": not model.normalize_router_weights,
            "router_scale": model.router_scale != 1,
        }
        given = [key for key, value in {**open_keys, **changed, "dense_layers": model.dense_layers}.items() if value]
        if given:
            return f"without model.experts these keys have no effect: {', '.join(given)}; set model.experts too", tuple(
                given
            )
        return None
    if model.experts_per_token > model.experts:
        text = f"a token cannot have {model.experts_per_token} experts of {model.experts}"
        return text, ("experts_per_token", "experts")
    if model.layers is not None and model.dense_layers >= model.layers:
        return (
            f"dense_layers {model.dense_layers} leaves none of {model.layers} layers for experts; leave experts out",
            ("dense_layers", "layers", "experts"),
        )
    return None


def variation_problem(model: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    """Return the problem with the variations of a shape and its keys; None if they are valid."""
    scaling = model.rope_scaling
    if scaling is not None:
        if scaling.kind != "linear" and scaling.original_length is None:
            return f"rope_scaling '{scaling.kind}' needs original_length", ("rope_scaling",)
        if scaling.kind == "llama3" and scaling.low_frequency_factor >= scaling.high_frequency_factor:
            return "low_frequency_factor must be less than high_frequency_factor", ("rope_scaling",)
        if model.rotary_fraction == 0:
            return "rope_scaling has no effect without a rotary embedding", ("rope_scaling", "rotary_fraction")
    if model.head_dim or (model.dim and model.heads):
        width = (model.head_dim or (model.dim or 0) // (model.heads or 1)) * model.rotary_fraction
        if int(width) % 2:
            text = f"rotary_fraction {model.rotary_fraction} turns {int(width)} elements of a head, an odd number"
            return text, ("rotary_fraction", "head_dim")
    if not (model.pre_norms or model.post_norms):
        return "without pre_norms and post_norms nothing normalises the residual stream", ("pre_norms", "post_norms")
    if model.qk_norm_over != "head" and not model.qk_norm:
        return "qk_norm_over has no effect without qk_norm", ("qk_norm_over", "qk_norm")
    if model.experts is not None and (model.activation != "swiglu" or model.ffn_bias):
        return "experts are SwiGLU layers without biases", ("experts", "activation", "ffn_bias")
    return _attention_problem(model) or _pattern_problem(model)


def _attention_problem(model: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    pattern = model.attention_pattern or ""
    slides = SLIDING in pattern
    if pattern and len(pattern) != model.layers:
        text = f"attention_pattern has {len(pattern)} layers, and model.layers is {model.layers}"
        return text, ("attention_pattern", "layers")
    if pattern and slides != (model.sliding_window is not None):
        text = (
            f"attention_pattern has {pattern.count(SLIDING)} sliding layers: set sliding_window for them, and only then"
        )
        return text, ("attention_pattern", "sliding_window")
    if model.local_rope_theta is not None and not slides:
        text = "local_rope_theta has no effect without sliding layers in attention_pattern"
        return text, ("local_rope_theta", "attention_pattern")
    return None


def _pattern_problem(model: ModelConfig) -> tuple[str, tuple[str, ...]] | None:
    pattern, mamba = model.layer_pattern, model.mamba
    if pattern is None:
        return None if mamba is None else ("mamba has no effect without layer_pattern", ("mamba", "layer_pattern"))
    if len(pattern) != model.layers:
        text = f"layer_pattern has {len(pattern)} layers, and model.layers is {model.layers}"
        return text, ("layer_pattern", "layers")
    if (MAMBA in pattern) != (mamba is not None):
        return f"layer_pattern has {pattern.count(MAMBA)} Mamba-2 layers: set model.mamba for them, and only then", (
            "layer_pattern",
            "mamba",
        )
    if mamba is not None and mamba.heads % mamba.groups:
        text = f"the {mamba.heads} heads of Mamba-2 cannot be divided into {mamba.groups} groups"
        return text, ("mamba.heads", "mamba.groups")
    if model.experts is not None or model.post_norms or model.sliding_window or model.attention_pattern:
        keys = ("experts", "post_norms", "sliding_window", "attention_pattern")
        text = f"layer_pattern excludes {', '.join(key for key in keys if getattr(model, key))}"
        return text, ("layer_pattern", *keys)
    return None


def division_problems(config: Config) -> Iterator[ConfigError]:
    """Yield the kinds of parallelism that Mamba-2 layers, or norms over all heads, do not allow."""
    if config.model.qk_norm_over == "projection" and config.parallel.tensor > 1:
        yield ConfigError(
            UNDIVIDED_NORM,
            where="parallel.tensor, model.qk_norm_over",
            fix="parallel.tensor=1, and more data parallelism",
        )
    if config.model.mamba is None:
        return
    for key, why in (
        ("tensor", "the groups of a Mamba-2 layer are not divided between workers"),
        ("context", "the state of a Mamba-2 layer passes through all positions of a row, one after the other"),
    ):
        if getattr(config.parallel, key) > 1:
            yield ConfigError(
                why, where=f"parallel.{key}, model.layer_pattern", fix=f"parallel.{key}=1, and more data parallelism"
            )

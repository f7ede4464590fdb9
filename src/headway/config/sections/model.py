"""The section `model`: the shape of the native decoder, or a pretrained model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from headway.config.base import Section, conflict
from headway.config.sections.architecture import MAMBA, SLIDING, UNDIVIDED_NORM, MambaConfig, RopeScaling
from headway.config.sections.parallel import ParallelConfig
from headway.config.sections.pretrained import AdapterConfig, PretrainedSource
from headway.config.shapes import SHAPES
from headway.config.units import Length
from headway.core.errors import ConfigError


class ModelConfig(Section):
    """The native decoder of the Llama family, or a pretrained model to continue."""

    preset: str | None = None
    """A named shape (`headway models` lists them); other keys of this section override it."""
    from_pretrained: PretrainedSource | None = None
    """A Hugging Face checkpoint to continue: a folder, or `hf://organisation/name@revision` on the Hub, which a run
    pins to a commit. Shape and initial weights come from it. A resumed run needs it too, and unchanged
    ([continue-a-model.md](continue-a-model.md))."""
    implementation: Literal["auto", "native", "transformers"] = "auto"
    """Code that computes a pretrained model. `native`: the decoder of this package, for the families that it knows
    ([continue-a-model.md](continue-a-model.md)). `transformers`: its class there. `auto`: `native` where it computes
    exactly this model and there is no adapter."""
    trust_remote_code: bool = False
    """Run code that comes with a pretrained model."""
    adapter: AdapterConfig | None = None
    """Train adapters instead of the weights of a pretrained model."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "eager", "flex"] = "auto"
    """Attention of a pretrained model that transformers computes, as it calls them; `auto` leaves the choice to it. The
    flash kernels need their package, a GPU and half precision."""
    neftune_alpha: Annotated[float, Field(ge=0.0)] = 0.0
    """Uniform noise in training on the embeddings of a pretrained model that transformers computes: at most this over
    the root of a row's number of values (NEFTune, Jain et al. 2023)."""
    router_aux_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the load-balancing loss of the routers of a pretrained model that transformers computes (Fedus et al.
    2021, equation 4). It is computed for each row over all layers, and averaged over the items of the global batch. The
    native decoder has `balance_loss`."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; the token store's vocabulary rounded up to a multiple of 64 when not given."""
    dim: PositiveInt | None = None
    """Width of the residual stream."""
    layers: PositiveInt | None = None
    """Number of decoder layers."""
    heads: PositiveInt | None = None
    """Query heads."""
    kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); `heads` when not given."""
    head_dim: PositiveInt | None = None
    """Width of a head; `dim / heads` when not given."""
    ffn_dim: PositiveInt | None = None
    """Inner width of the feed-forward layer."""
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    """Activation of the feed-forward layer: `swiglu` and `geglu` have a gate (Shazeer 2020, equation 6), of which
    `geglu` takes the GELU in its tanh form (Gemma); `relu2` is the squared ReLU, without one (So et al. 2021, section
    4.1)."""
    ffn_bias: bool = False
    """Biases in the feed-forward layer."""
    experts: PositiveInt | None = None
    """Routed experts of a layer, which replace its feed-forward layer
    ([mixture-of-experts.md](mixture-of-experts.md))."""
    experts_per_token: PositiveInt = 2
    """Routed experts that compute each token (top-k)."""
    normalize_router_weights: bool = True
    """Divide the weights of a token's experts by their sum, so that they add up to 1."""
    router_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of the output of routed experts (DeepSeek-V3, section 2.1.2; `routed_scaling_factor`)."""
    shared_experts: Annotated[int, Field(ge=0)] = 0
    """Additional experts that compute every token (Dai et al. 2024, section 3.2)."""
    expert_ffn_dim: PositiveInt | None = None
    """Inner width of an expert; `ffn_dim` when not given."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """First layers that keep a feed-forward layer of width `ffn_dim`."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that scores router logits: over all experts, or for each alone (DeepSeek-V3, section 2.1.2)."""
    router_z_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the router z-loss, a token's squared log-sum-exp (Zoph et al. 2022, equation 5), in each layer. When
    not given, 0.001, and 0 with `from_pretrained`."""
    balance_bias_rate: Annotated[float, Field(ge=0.0)] | None = None
    """Balances loads by a bias of each expert that moves by this much per step and affects only the choice of experts
    (Wang et al. 2024). When not given, 0.001 with sigmoid scores, and 0 with softmax or `from_pretrained`."""
    balance_loss: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the load-balancing loss (Fedus et al. 2021, equation 4) in each layer. When not given, 0.01 with
    softmax scores, and 0 with sigmoid or `from_pretrained`."""
    max_sequence_length: Length = 2048
    """Longest sequence that the model is meant for, e.g. `4096` or `128k`, which is 131,072."""
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0
    """Base of the rotary embedding (Su et al. 2021, section 3.2.2)."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies for longer sequences."""
    rotary_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of a head that the rotary embedding turns, its first elements; 0: none, so positions are not encoded."""
    local_rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary embedding in the sliding layers of `attention_pattern`, whose frequencies are then not scaled
    (Gemma 3); as in all layers when not given."""
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm1p"] = "rmsnorm"
    """`rmsnorm1p` (Gemma) and `layernorm1p` (Nemotron, a LayerNorm) have a gain of 1 plus their weight, so that weight
    decay pulls it to 1."""
    pre_norms: bool = True
    """Normalise the inputs of attention and feed-forward layers; false with `post_norms` alone (OLMo 2)."""
    post_norms: bool = False
    """Normalise the outputs of attention and feed-forward layers, before they are added (GLM-4, Gemma, OLMo 2)."""
    norm_eps: Annotated[float, Field(ge=0.0)] = 1e-5
    """Added to the mean square in norms."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Dehghani et al. 2023, section 2.2; as in Qwen 3)."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Part that `qk_norm` normalises: each head, or all heads of a token together (OLMo 2)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values (Qwen 2)."""
    output_bias: bool = False
    """Bias of the output of attention."""
    attention_scale: Annotated[float, Field(gt=0.0)] | None = None
    """Factor of attention scores; 1 / sqrt(width of a head) when not given."""
    attention_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Attention scores s become c tanh(s / c), with this c (Gemma 2)."""
    attention_pattern: Annotated[str, Field(pattern=r"^[FSN]+$")] | None = None
    """A letter per layer for its attention: `F` full, `S` sliding (`sliding_window`), `N` full without rotary
    embedding; when not given, the same in all layers."""
    layer_pattern: Annotated[str, Field(pattern=r"^[M*-]+$")] | None = None
    """A letter per layer, each of which is then one block with one norm: `M` Mamba-2, `*` attention, `-` feed-forward
    ([continue-a-model.md](continue-a-model.md#hybrid-models))."""
    mamba: MambaConfig | None = None
    """Sizes of the Mamba-2 layers of `layer_pattern`."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output projection too."""
    embedding_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of embeddings (Granite; Gemma has sqrt(dim))."""
    residual_scale: Annotated[float, Field(gt=0.0)] = 1.0
    """Factor of the outputs of attention and feed-forward layers, when they are added (Granite)."""
    logit_divisor: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits (Granite)."""
    logit_softcap: Annotated[float, Field(gt=0.0)] | None = None
    """Logits z become c tanh(z / c), with this c (Gemma 2)."""
    sliding_window: PositiveInt | None = None
    """Attend only to this many last positions (Mistral); full causal attention when not given. With
    `attention_pattern`, in its sliding layers."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the outputs of attention and feed-forward layers."""
    init_std: Annotated[float, Field(gt=0.0)] = 0.02
    """Standard deviation of the initial weights; output projections of a layer get 1/sqrt(2 * layers) of it."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not values.get("preset"):
            return values
        name = str(values["preset"]).lower()
        if name not in SHAPES:
            raise conflict(f"unknown model preset '{name}'; known ones: {', '.join(SHAPES)}", "preset")
        return {
            **SHAPES[name],
            **{key: value for key, value in values.items() if value is not None},
            "preset": name,
        }

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.from_pretrained is not None:
            return self
        missing = [key for key in ("dim", "layers", "heads", "ffn_dim") if getattr(self, key) is None]
        if missing:
            raise conflict(f"set a preset (for example 'preset: 4m'), or also: {', '.join(missing)}")
        assert self.dim and self.heads
        if self.head_dim is None and self.dim % self.heads:
            raise conflict(f"dim {self.dim} is not divisible by heads {self.heads}; set head_dim", "dim", "heads")
        if self.heads % (self.kv_heads or self.heads):
            text = f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}"
            raise conflict(text, "heads", "kv_heads")
        if (self.head_dim or self.dim // self.heads) % 2:
            raise conflict("the width of a head must be even for the rotary embedding", "head_dim", "dim", "heads")
        for problem in (experts_problem(self), variation_problem(self)):
            if problem is not None:
                raise conflict(problem[0], *problem[1])
        return self


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
    pattern = model.layer_pattern
    mamba = model.mamba
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


def division_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ConfigError]:
    """Yield the kinds of parallelism that Mamba-2 layers, or norms over all heads, do not allow."""
    if model.qk_norm_over == "projection" and parallel.tensor > 1:
        yield ConfigError(
            UNDIVIDED_NORM,
            where="parallel.tensor, model.qk_norm_over",
            fix="parallel.tensor=1, and more data parallelism",
        )
    if model.mamba is None:
        return
    for key, why in (
        ("tensor", "the groups of a Mamba-2 layer are not divided between workers"),
        ("context", "the state of a Mamba-2 layer passes through all positions of a row, one after the other"),
    ):
        if getattr(parallel, key) > 1:
            yield ConfigError(
                why, where=f"parallel.{key}, model.layer_pattern", fix=f"parallel.{key}=1, and more data parallelism"
            )


def pretrained_problems(model: ModelConfig, precision: str) -> Iterator[ConfigError]:
    """Yield the contradictions of the keys for pretrained models.

    Args:
        precision: `train.precision`.
    """
    if model.from_pretrained is None:
        given = {
            "model.implementation": model.implementation == "transformers",
            "model.adapter": model.adapter is not None,
            "model.trust_remote_code": model.trust_remote_code,
            "model.router_aux_weight": model.router_aux_weight > 0,
            "model.neftune_alpha": model.neftune_alpha > 0,
            "model.attention": model.attention != "auto",
        }
        for key in (key for key, value in given.items() if value):
            yield ConfigError(
                f"{key} is for pretrained models only", where=key, fix=f"set model.from_pretrained, or leave {key} out"
            )
        return
    if model.implementation == "native" and model.adapter is not None:
        yield ConfigError(
            "adapters need the layers of transformers, which the native decoder fuses",
            where="model.implementation, model.adapter",
            fix="model.implementation=auto",
        )
    if model.adapter is not None and model.adapter.frozen_precision == "bf16" and precision != "bf16":
        yield ConfigError(
            f"frozen matrices in bf16 cannot enter products in {precision}",
            where="model.adapter.frozen_precision, train.precision",
            fix="train.precision=bf16, or model.adapter.frozen_precision=auto",
        )
    if (
        model.adapter is not None
        and model.adapter.frozen_precision in ("int8", "nf4")
        and model.adapter.method == "dora"
    ):
        yield ConfigError(
            f"dora needs the norms of the frozen matrices, which {model.adapter.frozen_precision} does not keep",
            where="model.adapter.method, model.adapter.frozen_precision",
            fix="model.adapter.method=lora, or model.adapter.frozen_precision=auto",
        )

"""The section `model`: the shape of the native decoder, or a pretrained model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from headway.config.base import Section, conflict
from headway.config.sections.architecture import MambaConfig, RopeScaling, experts_problem, variation_problem
from headway.config.sections.pretrained import AdapterConfig, PretrainedSource
from headway.config.shapes import SHAPES


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
    max_sequence_length: PositiveInt = 2048
    """Longest sequence that the model is meant for."""
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

"""The families of transformers that the decoder computes: their keys in `config.json`, and which decoder is which.

A decoder's traits, such as biases or norms per head, say which family computes it. Families with experts have a file of
their own (`headway.models.huggingface_mixtures`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.config.architecture import ATTENTION, FEED_FORWARD, MAMBA
from headway.core.errors import ConfigError
from headway.models import huggingface_mixtures as mixtures
from headway.models.huggingface_rope import partial_rotary
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

LLAMA, MISTRAL, QWEN2, QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
GLM, GLM4, NEMOTRON = "GlmForCausalLM", "Glm4ForCausalLM", "NemotronForCausalLM"
NEMOTRON_H = "NemotronHForCausalLM"


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers without experts.

    `reads` and `writes` name keys of `config.json` whose values differ from those of Llama.
    """

    model_type: str
    defaults: Mapping[str, Any]
    """Key -> default of its config class, where it differs from Llama's."""
    may: frozenset[str] = frozenset()
    """Traits that its decoders may have."""
    must: frozenset[str] = frozenset()
    """Traits that all its decoders have."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the only value that the native decoder computes."""
    reads: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Content of `config.json` -> keys of `ModelConfig`."""
    writes: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Config -> keys of `config.json`."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Other name of a key -> the key; transformers prefers the other name where a config has both."""
    eps: str = "rms_norm_eps"
    """Key of `norm_eps`."""
    act: str = "hidden_act"
    """Key of the activation."""


def _biases(values: Mapping[str, Any], *, output: bool) -> dict[str, Any]:
    bias = bool(values.get("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias and output}


def _writes_window(config: ModelConfig) -> dict[str, Any]:
    # Without a version, transformers warns for every Mistral with a large vocabulary that its tokenizer splits words
    # wrongly. The keys written here are those of 5.0.
    return {"sliding_window": config.sliding_window, "transformers_version": "5.0.0"}


def _no_window(config: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


#: Hugging Face's names of the kinds of layers; older configs have a pattern of letters.
_KINDS = {MAMBA: "linear_attention", ATTENTION: "full_attention", FEED_FORWARD: "mlp"}
_OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}


def _read_hybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = values.get("layers_block_type") or values.get("hybrid_override_pattern") or ""
    letters = {name: letter for letter, name in _KINDS.items()} | _OLD_KINDS
    pattern = "".join(letters.get(kind, kind) for kind in kinds)
    mamba = {
        "heads": values["mamba_num_heads"],
        "head_dim": values["mamba_head_dim"],
        "state_dim": values["ssm_state_size"],
        "groups": values["n_groups"],
        "conv_width": values["conv_kernel"],
        "chunk": values["chunk_size"],
        "min_step": values["time_step_min"],
        "max_step": values["time_step_max"],
        "conv_bias": values["use_conv_bias"],
    }
    return {
        "layers": len(pattern),
        "layer_pattern": pattern,
        "mamba": mamba if MAMBA in pattern else None,
        "rotary_fraction": 0.0,
        "activation": "relu2",
    }


def _write_hybrid(config: ModelConfig) -> dict[str, Any]:
    pattern, mamba = config.layer_pattern or "", config.mamba
    sizes = {
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state_dim,
        "n_groups": mamba.groups,
        "conv_kernel": mamba.conv_width,
        "chunk_size": mamba.chunk,
        "time_step_min": mamba.min_step,
        "time_step_max": mamba.max_step,
        "use_conv_bias": mamba.conv_bias,
    } if mamba is not None else {}  # fmt: skip
    return {
        **sizes,
        "layers_block_type": [_KINDS[letter] for letter in pattern],
        "hybrid_override_pattern": pattern,
        "mamba_hidden_act": "silu",
        "mlp_bias": False,
        "use_bias": False,
        "attention_bias": False,
    }


def _write_glm(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "partial_rotary_factor": config.rotary_fraction}


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_GLM_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}

FAMILIES: dict[str, Family] = {
    LLAMA: Family(
        "llama",
        {"max_position_embeddings": 2048},
        may=frozenset({"attention_bias", "ffn_bias"}),
        reads=lambda values: {**_biases(values, output=True), "ffn_bias": bool(values.get("mlp_bias"))},
        writes=lambda config: {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias},
    ),
    MISTRAL: Family(
        "mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        may=frozenset({"sliding_window", "head_dim"}),
        required=_NO_BIASES,
        reads=lambda values: {"sliding_window": values.get("sliding_window")},
        writes=_writes_window,
    ),
    QWEN2: Family(
        "qwen2",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32},
        must=frozenset({"qkv_bias"}),
        required={"use_sliding_window": False},
        reads=lambda values: {"qkv_bias": True},
        writes=_no_window,
    ),
    QWEN3: Family(
        "qwen3",
        {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
        may=frozenset({"head_dim", "attention_bias"}),
        must=frozenset({"qk_norm"}),
        required={"use_sliding_window": False},
        reads=lambda values: {**_biases(values, output=True), "qk_norm": True},
        writes=lambda config: {"attention_bias": config.qkv_bias, **_no_window(config)},
    ),
    GLM: Family(
        "glm",
        _GLM_DEFAULTS,
        may=frozenset({"head_dim", "qkv_bias"}),
        must=frozenset({"rotary_fraction"}),
        reads=lambda values: {**_biases(values, output=False), **partial_rotary(values)},
        writes=_write_glm,
    ),
    GLM4: Family(
        "glm4",
        _GLM_DEFAULTS,
        may=frozenset({"head_dim", "qkv_bias", "rotary_fraction"}),
        must=frozenset({"post_norms"}),
        reads=lambda values: {**_biases(values, output=False), **partial_rotary(values), "post_norms": True},
        writes=_write_glm,
    ),
    NEMOTRON: Family(
        "nemotron",
        {"partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "hidden_act": "relu2", "norm_eps": 1e-5,
         "initializer_range": 0.0134},
        may=frozenset({"head_dim", "attention_bias", "ffn_bias", "rotary_fraction"}),
        must=frozenset({"norm", "activation"}),
        reads=lambda values: {
            **_biases(values, output=True), **partial_rotary(values), "ffn_bias": bool(values.get("mlp_bias")),
            "norm": "layernorm1p", "activation": "relu2",
        },
        writes=lambda config: {
            "attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias,
            "partial_rotary_factor": config.rotary_fraction,
        },
        eps="norm_eps",
    ),
    NEMOTRON_H: Family(
        "nemotron_h",
        {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
         "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "mamba_num_heads": 128, "mamba_head_dim": 64,
         "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "time_step_min": 0.001,
         "time_step_max": 0.1, "use_conv_bias": True, "intermediate_size": 21504},
        may=frozenset({"head_dim"}),
        must=frozenset({"layer_pattern", "activation", "no_rotary"}),
        required={"use_bias": False, "mlp_bias": False, "mamba_hidden_act": "silu", "sliding_window": None,
                  "residual_in_fp32": False, "tie_word_embeddings": False},
        reads=_read_hybrid,
        writes=_write_hybrid,
        other_names={"layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
                     "mamba_dt_min": "time_step_min", "mamba_dt_max": "time_step_max",
                     "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size"},
        eps="layer_norm_epsilon",
        act="mlp_hidden_act",
    ),
}  # fmt: skip

#: Trait -> the keys of the config that it comes from, for messages.
_KEYS = {
    "attention_bias": "qkv_bias and output_bias",
    "no_rotary": "rotary_fraction 0",
    "activation": "activation relu2",
    "norm": "norm layernorm1p",
    "head_dim": "heads that do not divide dim",
}


def traits(config: ModelConfig) -> frozenset[str]:
    """Return what distinguishes a decoder without experts from that of Llama without biases."""
    shape, both = Shape.of(config), config.qkv_bias and config.output_bias
    found = {
        "qk_norm": config.qk_norm,
        "sliding_window": config.sliding_window is not None,
        "rotary_fraction": 0 < config.rotary_fraction < 1,
        "no_rotary": config.rotary_fraction == 0,
        "attention_bias": both,
        "qkv_bias": config.qkv_bias and not both,
        "output_bias": config.output_bias and not both,
        "ffn_bias": config.ffn_bias,
        "activation": config.activation == "relu2",
        "norm": config.norm == "layernorm1p",
        "post_norms": config.post_norms,
        "layer_pattern": config.layer_pattern is not None,
        "tie_embeddings": config.tie_embeddings and config.layer_pattern is not None,  # Nemotron-H ties nothing
        "head_dim": bool(shape.dim % shape.heads),  # Llama's config class requires heads to divide the width
    }
    return frozenset(trait for trait, has in found.items() if has)


def architecture_of(config: ModelConfig) -> str:
    """Return the architecture of transformers that computes a decoder.

    Raises:
        ConfigError: none does.
    """
    if config.experts is not None:
        return mixtures.mixture_architecture(config)
    found = traits(config)
    for name, family in FAMILIES.items():
        if family.must <= found <= family.must | family.may:
            return name
    words = [_KEYS.get(trait, trait) for trait in sorted(found)]
    raise ConfigError(
        f"a decoder with {', '.join(words[:-1])} and {words[-1]} cannot be exported: no supported architecture has all"
        " of this",
        where=", ".join(f"model.{word.split()[0]}" for word in words if not word.startswith("heads ")),
        fix="train without one of them",
    )

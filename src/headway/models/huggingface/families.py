"""The families of transformers that the decoder computes: their keys in `config.json`, and which decoder is which.

A decoder's traits, such as biases or norms per head, say which family computes it. Families with experts have a file of
their own (`headway.models.huggingface.mixtures`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config import ModelConfig
from headway.config.sections.architecture import ATTENTION, FEED_FORWARD, FULL, MAMBA, NO_ROTARY, SLIDING
from headway.core.errors import ConfigError
from headway.models.huggingface import gemma, mixtures
from headway.models.huggingface.family import Family, attention_scale, biases
from headway.models.huggingface.rope import partial_rotary
from headway.models.shape import Shape

SMOLLM3 = "SmolLM3ForCausalLM"
GRANITE = "GraniteForCausalLM"
OLMO2 = "Olmo2ForCausalLM"
LLAMA = "LlamaForCausalLM"
MISTRAL = "MistralForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GLM = "GlmForCausalLM"
GLM4 = "Glm4ForCausalLM"
NEMOTRON = "NemotronForCausalLM"
NEMOTRON_H = "NemotronHForCausalLM"


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
    }


def _write_hybrid(config: ModelConfig) -> dict[str, Any]:
    pattern = config.layer_pattern or ""
    mamba = config.mamba
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


def _read_smollm3(values: Mapping[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    every = values["no_rope_layer_interval"]
    turns = values.get("no_rope_layers") or [(index + 1) % every != 0 for index in range(layers)]
    pattern = "".join(FULL if turn else NO_ROTARY for turn in turns[:layers])
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("its layer_types are not all full_attention")
    return {
        **biases(values, output=True),
        "ffn_bias": bool(values.get("mlp_bias")),
        "attention_pattern": pattern if NO_ROTARY in pattern else None,
    }


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
        "no_rope_layers": [int(kind != NO_ROTARY) for kind in Shape.of(config).attention_pattern],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _read_granite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **biases(values, output=True),
        "ffn_bias": bool(values.get("mlp_bias")),
        "embedding_scale": values["embedding_multiplier"],
        "residual_scale": values["residual_multiplier"],
        "logit_divisor": values["logits_scaling"],
        **attention_scale(values, values["attention_multiplier"]),
    }


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
        "attention_multiplier": config.attention_scale or Shape.of(config).head_dim ** -0.5,
    }


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
        reads=lambda values: {**biases(values, output=True), "ffn_bias": bool(values.get("mlp_bias"))},
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
        reads=lambda values: {**biases(values, output=True), "qk_norm": True},
        writes=lambda config: {"attention_bias": config.qkv_bias, **_no_window(config)},
    ),
    GLM: Family(
        "glm",
        _GLM_DEFAULTS,
        may=frozenset({"head_dim", "qkv_bias"}),
        must=frozenset({"rotary_fraction"}),
        reads=lambda values: {**biases(values, output=False), **partial_rotary(values)},
        writes=_write_glm,
    ),
    GLM4: Family(
        "glm4",
        _GLM_DEFAULTS,
        may=frozenset({"head_dim", "qkv_bias", "rotary_fraction"}),
        must=frozenset({"post_norms"}),
        reads=lambda values: {**biases(values, output=False), **partial_rotary(values), "post_norms": True},
        writes=_write_glm,
    ),
    NEMOTRON: Family(
        "nemotron",
        {"partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "hidden_act": "relu2", "norm_eps": 1e-5,
         "initializer_range": 0.0134},
        may=frozenset({"head_dim", "attention_bias", "ffn_bias", "rotary_fraction"}),
        must=frozenset({"norm", "activation"}),
        reads=lambda values: {
            **biases(values, output=True), **partial_rotary(values), "ffn_bias": bool(values.get("mlp_bias")),
            "norm": "layernorm1p",
        },
        writes=lambda config: {
            "attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias,
            "partial_rotary_factor": config.rotary_fraction,
        },
        eps="norm_eps",
        activation="relu2",
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
        activation="relu2",
    ),
    SMOLLM3: Family(
        "smollm3",
        {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6,
         "no_rope_layer_interval": 4},
        may=frozenset({"attention_bias", "ffn_bias"}),
        must=frozenset({"layers_without_rotary"}),
        required={"use_sliding_window": False},
        reads=_read_smollm3,
        writes=_write_smollm3,
    ),
    GRANITE: Family(
        "granite",
        {"max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
         "attention_multiplier": 1.0, "logits_scaling": 1.0},
        may=frozenset({"attention_bias", "ffn_bias", "embedding_scale", "root_embedding_scale", "attention_scale",
                       "root_attention_scale", "residual_scale", "logit_divisor"}),
        reads=_read_granite,
        writes=_write_granite,
    ),
    OLMO2: Family(
        "olmo2",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        may=frozenset({"attention_bias"}),
        must=frozenset({"no_pre_norms", "post_norms", "projection_norm"}),
        reads=lambda values: {
            **biases(values, output=True), "pre_norms": False, "post_norms": True, "qk_norm": True,
            "qk_norm_over": "projection",
        },
        writes=lambda config: {"attention_bias": config.qkv_bias},
        weights={
            "attention_post_norm.weight": "post_attention_layernorm.weight",
            "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
        },
    ),
    **gemma.FAMILIES,
}  # fmt: skip

#: Trait -> the keys of the config that it comes from, for messages.
_KEYS = {
    "attention_bias": "qkv_bias and output_bias",
    "no_rotary": "rotary_fraction 0",
    "activation": "activation relu2",
    "norm": "norm layernorm1p",
    "rmsnorm1p": "norm rmsnorm1p",
    "geglu": "activation geglu",
    "layers_without_rotary": "attention_pattern with N",
    "sliding_layers": "attention_pattern with S",
    "no_pre_norms": "pre_norms false",
    "projection_norm": "qk_norm_over projection",
    "root_embedding_scale": "embedding_scale of the root of dim",
    "root_attention_scale": "attention_scale",
    "head_dim": "heads that do not divide dim",
}


def traits(config: ModelConfig) -> frozenset[str]:
    """Return what distinguishes a decoder without experts from that of Llama without biases."""
    shape = Shape.of(config)
    both = config.qkv_bias and config.output_bias
    pattern = config.attention_pattern or ""
    over_heads = config.qk_norm_over == "projection"
    is_root = gemma.scales_by_root(config)
    scaled_by_root = gemma.root_of(config.attention_scale) is not None
    found = {
        "qk_norm": config.qk_norm and not over_heads,
        "projection_norm": over_heads,
        "sliding_window": config.sliding_window is not None and not pattern,
        "sliding_layers": SLIDING in pattern,
        "layers_without_rotary": NO_ROTARY in pattern,
        "local_rope_theta": config.local_rope_theta is not None,
        "embedding_scale": config.embedding_scale != 1 and not is_root,
        "root_embedding_scale": is_root,
        "attention_scale": config.attention_scale is not None and not scaled_by_root,
        "root_attention_scale": scaled_by_root,
        "residual_scale": config.residual_scale != 1,
        "logit_divisor": config.logit_divisor != 1,
        "attention_softcap": config.attention_softcap is not None,
        "logit_softcap": config.logit_softcap is not None,
        "rotary_fraction": 0 < config.rotary_fraction < 1,
        "no_rotary": config.rotary_fraction == 0,
        "attention_bias": both,
        "qkv_bias": config.qkv_bias and not both,
        "output_bias": config.output_bias and not both,
        "ffn_bias": config.ffn_bias,
        "activation": config.activation == "relu2",
        "geglu": config.activation == "geglu",
        "norm": config.norm == "layernorm1p",
        "rmsnorm1p": config.norm == "rmsnorm1p",
        "no_pre_norms": not config.pre_norms,
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

"""Gemma 2 (Gemma team 2024, section 2) and the text models of Gemma 3 (Gemma team 2025, section 2).

Both alternate sliding and full layers, scale embeddings by the root of their width, and normalise the input and the
output of every part. Gemma 2 caps scores and logits. Gemma 3 normalises queries and keys, and its sliding layers have a
rotary base of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config import ModelConfig
from headway.config.sections.architecture import FULL, SLIDING
from headway.models.huggingface.family import Family, attention_scale, biases
from headway.models.huggingface.rope import to_rotary_keys
from headway.models.shape import Shape

GEMMA2 = "Gemma2ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"

_LAYER_TYPES = {FULL: "full_attention", SLIDING: "sliding_attention"}


def _read(values: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Read the keys of both; of so many layers the last one is full by default."""
    layers = values["num_hidden_layers"]
    letters = {name: letter for letter, name in _LAYER_TYPES.items()}
    default = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    pattern = "".join(letters[kind] for kind in (values.get("layer_types") or default)[:layers])
    return {
        **biases(values, output=True),
        "norm": "rmsnorm1p",
        "post_norms": True,
        "embedding_scale": values["hidden_size"] ** 0.5,
        "attention_pattern": pattern if SLIDING in pattern else None,
        "sliding_window": values["sliding_window"] if SLIDING in pattern else None,
        "logit_softcap": values.get("final_logit_softcapping"),
        **attention_scale(values, values["query_pre_attn_scalar"] ** -0.5),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    shape = Shape.of(config)
    return {
        "attention_bias": config.qkv_bias,
        "layer_types": [_LAYER_TYPES[kind] for kind in shape.attention_pattern],
        # transformers makes a mask of it even if no layer slides.
        "sliding_window": config.sliding_window or config.max_sequence_length,
        "query_pre_attn_scalar": root_of(config.attention_scale) or shape.head_dim,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "use_bidirectional_attention": False,
    }


def scales_by_root(config: ModelConfig) -> bool:
    """Return whether embeddings are scaled by the root of their width."""
    return config.dim is not None and config.embedding_scale == config.dim**0.5 != 1


def root_of(scale: float | None) -> int | None:
    """Return the integer of which a factor is one over the root; None if there is none."""
    whole = 0 if scale is None else round(scale**-2)
    return whole if whole and whole**-0.5 == scale else None


def _read_3(values: Mapping[str, Any]) -> dict[str, Any]:
    keys = _read(values, values.get("sliding_window_pattern", 6))
    if keys["attention_pattern"] is not None:
        keys["local_rope_theta"] = values["local_rope_theta"]
    return {**keys, "qk_norm": True}


def _flat_rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Gemma 3 with the rotary settings of full layers alone, and the base of sliding ones."""
    both = values.get("rope_parameters") or {}
    kinds = {kind: both.get(kind) or {} for kind in _LAYER_TYPES.values()}
    full = {
        "rope_theta": values.get("rope_theta", 1e6),
        **kinds["full_attention"],
        **(values.get("rope_scaling") or {}),
    }
    local = {"rope_theta": values.get("rope_local_base_freq", 1e4), **kinds["sliding_attention"]}
    flat: dict[str, Any] = {"rope_parameters": full, "rope_scaling": None}
    if local == full:
        return {**flat, "local_rope_theta": None}
    if local.get("rope_type", "default") != "default":
        raise ValueError("the rotary embedding of its sliding layers is scaled")
    return {**flat, "local_rope_theta": float(local["rope_theta"])}


def _write_3(config: ModelConfig) -> dict[str, Any]:
    full = to_rotary_keys(config, partial=False)["rope_parameters"]
    local = full if config.local_rope_theta is None else {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        **_write(config),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_local_base_freq": local["rope_theta"],
    }


_MUST = frozenset({"rmsnorm1p", "geglu", "root_embedding_scale", "post_norms"})
_MAY = frozenset({"attention_bias", "sliding_layers", "sliding_window", "root_attention_scale", "logit_softcap"})
_WEIGHTS = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.weight": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.weight": "post_feedforward_layernorm.weight",
}
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES = {
    GEMMA2: Family(
        "gemma2",
        {**_DEFAULTS, "max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        may=_MAY | {"attention_softcap"},
        must=_MUST,
        required={"use_bidirectional_attention": False},
        reads=lambda values: {**_read(values, 2), "attention_softcap": values.get("attn_logit_softcapping")},
        writes=_write,
        act="hidden_activation",
        activation="geglu",
        weights=_WEIGHTS,
    ),
    GEMMA3: Family(
        "gemma3_text",
        {**_DEFAULTS, "max_position_embeddings": 131_072},
        may=_MAY | {"local_rope_theta"},
        must=_MUST | {"qk_norm"},
        required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        reads=_read_3,
        writes=_write_3,
        flattens=_flat_rotary,
        act="hidden_activation",
        activation="geglu",
        weights=_WEIGHTS,
    ),
}

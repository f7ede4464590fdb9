"""Conversion between the `config.json` of Hugging Face checkpoints of the Llama family and `ModelConfig`.

The keys are those of transformers' `LlamaConfig`, `MistralConfig`, `Qwen3Config` and the configs with experts, in the
spellings of versions 4 (`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
"""

from __future__ import annotations

from typing import Any

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models import huggingface_mixtures as mixtures
from headway.models.facts import count_parameters
from headway.models.shape import Shape

#: Architecture -> the defaults of its config class for missing keys.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    **mixtures.DEFAULTS,
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
    **mixtures.MODEL_TYPES,
}
_WITH_WINDOW = ("MistralForCausalLM", mixtures.MIXTRAL)
#: Key -> the only value that this decoder supports.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "quantization_config": None,
    **mixtures.REQUIRED,
}

#: Key -> the largest accepted size, far above that of any existing model. A config with a larger size is damaged or
#: hostile, and building that many modules would exhaust time and memory.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**26,
    "sliding_window": 2**31,
    "num_local_experts": 2**16,
    "num_experts": 2**16,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**10,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**22,
    "first_k_dense_replace": 10_000,
}
_MOST_PARAMETERS = 10**14


def from_huggingface(values: dict[str, Any], where: str) -> ModelConfig:
    """Convert the content of `config.json` to a complete config.

    Args:
        values: Content of `config.json`.
        where: Name of the file in messages.

    Raises:
        ConfigError: the architecture or a variant of it is not supported, or the sizes are not those of any model.
    """
    architecture = _architecture(values, where)
    _check_sizes(values, where)
    values = {**_DEFAULTS[architecture], **values}
    for rotary in _rotary(values, where)[:1]:
        if "partial_rotary_factor" in rotary:
            values["partial_rotary_factor"] = rotary["partial_rotary_factor"]
    for key, required in _REQUIRED.items():
        if values.get(key, required) not in (required, None):
            raise ConfigError(
                f"{key} is {values[key]!r}; the native decoder computes {required!r} only",
                where=where,
                fix="use a checkpoint without this setting",
            )
    try:
        dim, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        config = ModelConfig(
            vocab_size=values["vocab_size"],
            dim=dim,
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or dim // heads,
            ffn_dim=values["intermediate_size"],
            max_sequence_length=values["max_position_embeddings"],
            rope_theta=_rope_theta(values, where),
            norm_eps=values.get("rms_norm_eps", 1e-6),
            qk_norm=architecture in ("Qwen3ForCausalLM", mixtures.QWEN) or bool(values.get("use_qk_norm")),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            sliding_window=values.get("sliding_window") if architecture in _WITH_WINDOW else None,
            init_std=values.get("initializer_range") or 0.02,
            **(mixtures.from_mixture_keys(architecture, values, where) if architecture in mixtures.MIXTURES else {}),
        )
    except KeyError as error:
        raise ConfigError(f"the key {error} is missing", where=where, fix="give a complete checkpoint") from error
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(f"the sizes make no decoder: {error}", where=where, fix="give a sound checkpoint") from error
    parameters = count_parameters(config).total
    if parameters > _MOST_PARAMETERS:
        raise ConfigError(
            f"the sizes make a model of {parameters:,} parameters, more than any has",
            where=where,
            fix="give a sound checkpoint",
        )
    return config


def _check_sizes(values: dict[str, Any], where: str) -> None:
    for key, largest in _LARGEST.items():
        value = values.get(key)
        if isinstance(value, int | float) and not value <= largest:  # NaN too
            raise ConfigError(
                f"{key} is {value!r}, more than any model has (up to {largest:,} is read)",
                where=where,
                fix="give a sound checkpoint",
            )


def _architecture(values: dict[str, Any], where: str) -> str:
    names = values.get("architectures") or [
        name for name, kind in _MODEL_TYPES.items() if kind == values.get("model_type")
    ]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"architectures is {names!r}, not a list of names", where=where, fix="give a sound checkpoint"
        )
    if len(names) != 1 or names[0] not in _MODEL_TYPES:
        found = ", ".join(map(str, names)) or str(values.get("model_type") or "none")
        raise ConfigError(
            f"the architecture is not supported: {found}",
            where=where,
            fix=f"give a checkpoint of one of: {', '.join(_MODEL_TYPES)}",
        )
    return str(names[0])


def _rotary(values: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the rotary settings, beginning with those that transformers prefers if both keys are present."""
    found = [(key, values[key]) for key in ("rope_scaling", "rope_parameters") if values.get(key)]
    for key, value in found:
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key} is {value!r}, not a mapping of keys to values", where=where, fix="give a sound checkpoint"
            )
    return [value for _, value in found]


def _rope_theta(values: dict[str, Any], where: str) -> float:
    """Return the rotary base; raise for scaled rotary embeddings, which the decoder would silently compute wrongly."""
    rotary = _rotary(values, where)
    for parameters in rotary:
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"the rotary embedding is scaled ({kind}); the native decoder computes the plain one only",
                where=f"{where}, rope_parameters or rope_scaling",
                fix="use a checkpoint without rope scaling",
            )
    return float((rotary or [{}])[0].get("rope_theta", values.get("rope_theta", 10_000.0)))


def to_huggingface(config: ModelConfig, dtype: str, special_ids: dict[str, int | None]) -> dict[str, Any]:
    """Build the content of `config.json` for a decoder, readable by transformers 4 and 5.

    Args:
        config: A complete config.
        dtype: Dtype of the weights in torch's spelling: `float32`, `bfloat16`.
        special_ids: `bos_token_id`, `eos_token_id`, `pad_token_id`.

    Raises:
        ConfigError: no architecture of transformers computes this decoder.
    """
    shape = Shape.of(config)
    architecture = "LlamaForCausalLM"
    own: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
    if config.sliding_window or shape.dim % shape.heads:  # Llama's config class requires heads to divide the width
        architecture = "MistralForCausalLM"
        # Without a version, transformers warns for every Mistral with a large vocabulary that its tokenizer splits
        # words wrongly. The keys written here are those of 5.0.
        own = {"sliding_window": config.sliding_window, "transformers_version": "5.0.0"}
    if config.qk_norm:
        if config.sliding_window:
            raise ConfigError(
                "a decoder with qk_norm and a sliding window cannot be exported: no supported architecture has both",
                where="model.qk_norm, model.sliding_window",
                fix="train with one of them",
            )
        architecture = "Qwen3ForCausalLM"
        own = {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    if config.experts is not None:
        architecture, own = mixtures.mixture_architecture(config), mixtures.mixture_keys(config)
    return {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": min(config.init_std, 1.0),  # transformers rejects larger values
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        **own,
        **special_ids,
        "dtype": dtype,
        "torch_dtype": dtype,
    }

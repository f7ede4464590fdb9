"""Conversion between the `config.json` of Hugging Face checkpoints of the Llama family and `ModelConfig`.

The keys are those of the families in `families` and `mixtures`, in the spellings of versions 4
(`torch_dtype`, `rope_theta`, `rope_scaling`) and 5 (`dtype`, `rope_parameters`).
"""

from __future__ import annotations

from typing import Any

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.facts import count_parameters
from headway.models.huggingface import mixtures
from headway.models.huggingface.families import FAMILIES, architecture_of
from headway.models.huggingface.family import Family
from headway.models.huggingface.largest import check_sizes
from headway.models.huggingface.rope import from_rotary_keys, rotary_settings, to_rotary_keys
from headway.models.shape import Shape

#: Key -> the only value that this decoder supports, in any family that has the key.
_REQUIRED: dict[str, Any] = {"quantization_config": None}
_DEFAULTS = {**{name: family.defaults for name, family in FAMILIES.items()}, **mixtures.DEFAULTS}
_MODEL_TYPES = {**{name: family.model_type for name, family in FAMILIES.items()}, **mixtures.MODEL_TYPES}
#: Of families with experts, as `Family` has it.
_MIXTURE = Family("", {}, required={"mlp_bias": False, **mixtures.REQUIRED})

#: Activations, by their names in `ModelConfig`, as transformers calls them.
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "relu2": "relu2"}
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
    check_sizes(values, where)
    family = FAMILIES.get(architecture, _MIXTURE)
    renamed = {key: values[name] for name, key in family.other_names.items() if name in values}
    values = {**_DEFAULTS[architecture], **values, **renamed}
    try:
        values |= family.flattens(values)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"its rotary embedding is none that the native decoder computes: {error}",
            where=f"{where}, rope_parameters or rope_scaling",
            fix="give a sound checkpoint, or model.implementation=transformers",
        ) from error
    rotary = rotary_settings(values, where)
    for key, required in _required(architecture, family).items():
        value = rotary.get(key, values.get(key)) if key == "partial_rotary_factor" else values.get(key)
        if value not in (required, None):
            raise ConfigError(
                f"{key} is {value!r}; the native decoder computes {required!r} only",
                where=where,
                fix="use a checkpoint without this setting, or model.implementation=transformers",
            )
    try:
        dim = int(values["hidden_size"])
        heads = int(values["num_attention_heads"])
        own = mixtures.from_mixture_keys(architecture, values, where) if family is _MIXTURE else family.reads(values)
        keys = {
            "vocab_size": values["vocab_size"],
            "dim": dim,
            "heads": heads,
            "kv_heads": values.get("num_key_value_heads") or heads,
            "head_dim": values.get("head_dim") or dim // heads,
            "ffn_dim": values["intermediate_size"],
            "activation": family.activation,
            "max_sequence_length": values["max_position_embeddings"],
            "norm_eps": values.get(family.eps, 1e-6),
            "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
            "init_std": values.get("initializer_range") or 0.02,
            **({} if "layers" in own else {"layers": values["num_hidden_layers"]}),
            **(from_rotary_keys(values, where) if own.get("rotary_fraction") != 0 else {}),
        }
        config = ModelConfig(**keys, **own)
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
    kind = values.get("model_type")
    if kind not in (None, _MODEL_TYPES[names[0]]):  # transformers goes by the type
        raise ConfigError(
            f"the architecture is {names[0]}, but model_type is {kind!r}",
            where=where,
            fix="give a sound checkpoint, or model.implementation=transformers",
        )
    return str(names[0])


def _required(architecture: str, family: Family) -> dict[str, Any]:
    """Return the values of keys without which the decoder would silently compute something else."""
    turns_all = {} if "partial_rotary_factor" in _DEFAULTS[architecture] else {"partial_rotary_factor": 1.0}
    return {**_REQUIRED, family.act: _ACTIVATIONS[family.activation], **turns_all, **family.required}


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
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture, _MIXTURE)
    own = mixtures.mixture_keys(config) if family is _MIXTURE else family.writes(config)
    rotary = to_rotary_keys(config, partial="partial_rotary_factor" in own) if config.rotary_fraction else {}
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
        family.act: _ACTIVATIONS[config.activation],
        "max_position_embeddings": config.max_sequence_length,
        "initializer_range": min(config.init_std, 1.0),  # transformers rejects larger values
        family.eps: config.norm_eps,
        **rotary,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        **own,
        **special_ids,
        "dtype": dtype,
        "torch_dtype": dtype,
    }

"""Building a decoder with weights from a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from headway.config import ModelConfig
from headway.config.derived.experts import BALANCE_KEYS, resolved_balance
from headway.core.errors import ConfigError
from headway.models.decoder import Decoder
from headway.models.hub.folder import open_folder
from headway.models.hub.implementation import choose_implementation
from headway.models.hub.transformers_build import build_transformers_model, complete_from_transformers, read_config
from headway.models.huggingface.checkpoint import import_model, open_model, read_model_config
from headway.models.no_values import NoFirstValues
from headway.models.shape import embedding_rows

if TYPE_CHECKING:
    from headway.models.hub.transformers_model import TransformersModel

#: Keys that say which pretrained model is trained, and by what code.
_SOURCE_KEYS = {
    "preset",
    "from_pretrained",
    "implementation",
    "trust_remote_code",
    "adapter",
    "router_aux_weight",
    "neftune_alpha",
    "attention",
}
#: Keys that matter only in training; the config keeps them even if a checkpoint determines the shape.
_TRAINING_KEYS = ("dropout", "init_std", *BALANCE_KEYS)
#: Defaults that were other ones when older runs spelled out their configs.
_FORMER_DEFAULTS = {"router_z_loss": 0.001}


def complete(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """Fill in every size of the config; the function is idempotent.

    With `from_pretrained` the checkpoint determines the shape; `config` contributes only the training keys, such as
    `dropout`, and a larger `max_sequence_length`. Without it an unset `vocab_size` becomes the tokenizer's, rounded up
    to a multiple of 64.

    Args:
        config: The user's config.
        vocab_size: Number of token ids that the data may contain.

    Raises:
        ConfigError: the vocabulary is smaller than the data's, or a key contradicts the checkpoint's.
        CheckpointError: the checkpoint's config cannot be read.
    """
    by_transformers = False
    if config.from_pretrained is not None:
        by_transformers = choose_implementation(config) == "transformers"
        if config.neftune_alpha and not by_transformers:
            raise ConfigError(
                "the native decoder computes this model, and adds no noise to embeddings",
                where="model.neftune_alpha",
                fix="model.implementation=transformers",
            )
        if config.attention != "auto" and not by_transformers:
            raise ConfigError(
                "the native decoder computes this model, with attention of its own",
                where="model.attention",
                fix="model.implementation=transformers, or model.attention=auto",
            )
        if config.router_aux_weight and not by_transformers:
            raise ConfigError(
                "the native decoder computes this model, and balances its experts by losses of its own",
                where="model.router_aux_weight",
                fix="model.balance_loss instead; or model.implementation=transformers",
            )
        config = _with_transformers_sizes(config) if by_transformers else _with_pretrained_shape(config)
    rows = config.vocab_size or embedding_rows(vocab_size)
    if rows < vocab_size:
        raise ConfigError(
            f"the model's vocabulary of {rows:,} is smaller than the tokenizer's of {vocab_size:,}",
            where=f"config.json of {config.from_pretrained}" if config.from_pretrained else "model.vocab_size",
            fix="prepare the data with the checkpoint's own tokenizer (data.tokenizer.path)"
            if config.from_pretrained
            else "leave model.vocab_size out, or raise it",
        )
    if by_transformers:
        return config
    assert config.heads is not None and config.dim is not None
    return config.model_copy(
        update={
            "vocab_size": rows,
            "kv_heads": config.kv_heads or config.heads,
            "head_dim": config.head_dim or config.dim // config.heads,
            "expert_ffn_dim": config.expert_ffn_dim or (config.ffn_dim if config.experts else None),
            **resolved_balance(config),
        }
    )


def _with_transformers_sizes(config: ModelConfig) -> ModelConfig:
    found = complete_from_transformers(config, read_config(config))
    for key in sorted(_given(config) - _SOURCE_KEYS):
        ours = getattr(config, key)
        theirs = getattr(found, key)
        if key not in ("vocab_size", "max_sequence_length") or ours != theirs:
            raise ConfigError(
                f"model.{key} is set, but config.json of the pretrained model decides it",
                where=str(config.from_pretrained),
                fix=f"leave model.{key} out" + (", or the model.preset that sets it" if config.preset else ""),
            )
    return found


def _with_pretrained_shape(config: ModelConfig) -> ModelConfig:
    assert config.from_pretrained is not None
    pretrained = read_model_config(open_folder(config.from_pretrained, with_code=config.trust_remote_code))
    kept = {key: getattr(config, key) for key in (*_SOURCE_KEYS, *_TRAINING_KEYS)} | {"implementation": "native"}
    for key in sorted(_given(config) - kept.keys()):
        ours = getattr(config, key)
        theirs = getattr(pretrained, key)
        if key == "max_sequence_length" and ours > theirs and ours != type(config).model_fields[key].default:
            kept[key] = ours  # only a bound: the decoder computes rotary tables for any length
        elif ours != theirs:
            raise ConfigError(
                f"model.{key} is {ours}, but the checkpoint has {theirs}",
                where=str(config.from_pretrained),
                fix=f"leave model.{key} out" + (", or the model.preset that sets it" if config.preset else ""),
            )
    if pretrained.experts is not None and pretrained.router_score == "softmax" and config.balance_bias_rate:
        raise ConfigError(
            f"model.balance_bias_rate is {config.balance_bias_rate}, but the checkpoint has softmax scores, and hence"
            " no bias for the choice of experts",
            where=str(config.from_pretrained),
            fix="model.balance_bias_rate=0, and balance by model.balance_loss",
        )
    return pretrained.model_copy(update=kept)


def _given(config: ModelConfig) -> set[str]:
    """Return the keys that were set explicitly.

    If every key is set, a program wrote the config, and default values do not count.
    """
    fields = type(config).model_fields
    given = config.model_fields_set
    spelled_out = given >= fields.keys()
    return {
        key
        for key in given
        if (value := getattr(config, key)) is not None
        and not (spelled_out and value in (fields[key].default, _FORMER_DEFAULTS.get(key)))
    }


def build_any_model(
    config: ModelConfig, *, vocab_size: int, seed: int, initialize: bool = True
) -> Decoder | TransformersModel:
    """Build the native decoder, or the model of transformers, on the CPU in fp32.

    Args:
        config: Complete.
        vocab_size: Number of token ids that the data may contain.
        seed: Seed of weights that are drawn.
        initialize: False leaves the weights of a native decoder uninitialised, and needs no pretrained model for it.

    Raises:
        ConfigError, CheckpointError: as `build_model` and `build_transformers_model`.
    """
    if config.implementation == "transformers":
        return build_transformers_model(config, seed=seed)
    settings = config if initialize else config.model_copy(update={"from_pretrained": None})
    return build_model(settings, vocab_size=vocab_size, seed=seed, initialize=initialize)


def build_pretrained(config: ModelConfig) -> Decoder | TransformersModel:
    """Build the model of a Hugging Face folder or of a name on the Hub, with its weights, on the CPU in fp32.

    Args:
        config: With `from_pretrained`; may be incomplete.

    Raises:
        ConfigError, CheckpointError: as `build_any_model`.
    """
    return build_any_model(complete(config, 1), vocab_size=1, seed=0)


def build_model(
    config: ModelConfig,
    *,
    vocab_size: int,
    seed: int,
    initialize: bool = True,
    stages: Sequence[range] | None = None,
) -> Decoder:
    """Build a decoder on the CPU in fp32, with initial weights from the seed or from `config.from_pretrained`.

    Args:
        config: May be incomplete.
        vocab_size: Number of token ids that the data may contain.
        seed: Seed of the initial weights.
        stages: Layers of the pipeline stages to build; the whole model by default.
        initialize: False leaves the weights uninitialised, for a caller that loads all of them.

    Raises:
        ConfigError, CheckpointError: as `complete` and `headway.models.huggingface.checkpoint.import_model`.
    """
    config = complete(config, vocab_size)
    model = _without_values(config, stages, "cpu")
    if initialize and config.from_pretrained is not None:
        weights = import_model(open_folder(config.from_pretrained))[1]
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    elif initialize:
        model.initialize(seed)
    return model


def build_without_memory(
    config: ModelConfig, *, vocab_size: int, seed: int, stages: Sequence[range] | None = None
) -> tuple[Decoder, Callable[[str, Sequence[int]], torch.Tensor]]:
    """Build a decoder on the meta device, and a function for the initial value of any tensor of its state.

    The function takes name and size and returns the value on the CPU. Unlike `build_model`, no whole model ever exists.
    The caller must create the rotary tables too.

    Raises:
        ConfigError, CheckpointError: as `build_model`; the returned function raises the latter too.
    """
    config = complete(config, vocab_size)
    model = _without_values(config, stages, "meta")
    if config.from_pretrained is None:
        return model, lambda name, size: model.first_value(name, size, seed)
    read = open_model(open_folder(config.from_pretrained))[1]
    return model, lambda name, size: read(name)


def _without_values(config: ModelConfig, stages: Sequence[range] | None, device: str) -> Decoder:
    with torch.device(device), NoFirstValues():
        model = Decoder(config)
    if stages is not None:
        model.keep_stages(stages)
    return model

"""Sizes and costs of a model of transformers, which is made on the meta device for that."""

from __future__ import annotations

from functools import lru_cache

import torch

from headway.config import ModelConfig
from headway.models.hub.folder import base_folder
from headway.models.hub.transformers_build import (
    attention_options,
    explained,
    load_transformers,
    read_config,
    with_adapter,
)
from headway.models.hub.transformers_model import TransformersModel


def sizes_of(config: ModelConfig) -> tuple[int, int, int]:
    """Count all parameters, those of embedding and output projection, and those that compute a token.

    Raises:
        ConfigError: transformers cannot make the model.
    """
    model = model_without_weights(config)
    ends = [model.causal.get_input_embeddings().weight, model.output_projection()]
    embedding = sum({id(p): p.numel() for p in ends if p is not None}.values())  # a tied matrix counts once
    total = sum(p.numel() for p in model.parameters())
    return total, embedding, round(sum(model.active_share(p) * p.numel() for p in model.parameters()))


def flops_of(config: ModelConfig, sequence_length: int) -> float:
    """Estimate the training FLOPs per token, as `TransformersModel.flops_per_token` does.

    Raises:
        ConfigError: transformers cannot make the model.
    """
    return model_without_weights(config).flops_per_token(sequence_length)


def model_without_weights(config: ModelConfig) -> TransformersModel:
    """Return the model on the meta device, adapters included; it is made once.

    Raises:
        ConfigError: transformers cannot make the model, or it cannot have the adapter.
    """
    return _made(config.model_dump_json())


@lru_cache(maxsize=2)  # large models take seconds, and several sizes are asked of one
def _made(dumped: str) -> TransformersModel:
    config = ModelConfig.model_validate_json(dumped)
    found = read_config(config)
    assert config.from_pretrained is not None, "read_config has checked it"
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    with explained(folder), torch.device("meta"):
        network = load_transformers().AutoModelForCausalLM.from_config(
            found, trust_remote_code=config.trust_remote_code, dtype=torch.float32, **attention_options(config)
        )
        return with_adapter(config, network, seed=0)

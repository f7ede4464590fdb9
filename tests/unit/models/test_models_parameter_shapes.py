from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.facts import count_parameters, parameter_shapes

SHAPE: dict[str, Any] = {"dim": 96, "layers": 3, "heads": 6, "ffn_dim": 200, "vocab_size": 640}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 2},
        {"qk_norm": True},
        {"head_dim": 24},
        {"tie_embeddings": True},
        {"qkv_bias": True, "output_bias": True, "ffn_bias": True},
        {"norm": "layernorm1p", "activation": "relu2", "ffn_bias": True},
        {"post_norms": True},
        {"post_norms": True, "pre_norms": False, "qk_norm": True, "qk_norm_over": "projection", "kv_heads": 2},
        {"post_norms": True, "norm": "rmsnorm1p", "activation": "geglu", "qk_norm": True},
        {"experts": 4, "shared_experts": 1, "dense_layers": 1},
        {"layer_pattern": "M*-", "mamba": {"heads": 8, "head_dim": 4, "state_dim": 6, "groups": 2}},
        {"layer_pattern": "MM-", "mamba": {"heads": 8, "conv_bias": False}},
    ],
)
def test_names_shapes_and_order_are_those_of_the_module(changes: dict[str, Any]) -> None:
    config = ModelConfig(**{**SHAPE, **changes})
    with torch.device("meta"):
        model = Decoder(config)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert list(parameter_shapes(config).items()) == expected
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())

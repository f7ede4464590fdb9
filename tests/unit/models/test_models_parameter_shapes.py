from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.facts import parameter_shapes

SHAPE: dict[str, Any] = {"dim": 96, "layers": 3, "heads": 6, "ffn_dim": 200, "vocab_size": 640}


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 2}, {"qk_norm": True}, {"head_dim": 24}, {"tie_embeddings": True}]
)
def test_names_shapes_and_order_are_those_of_the_module(changes: dict[str, Any]) -> None:
    config = ModelConfig(**{**SHAPE, **changes})
    with torch.device("meta"):
        model = Decoder(config)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert list(parameter_shapes(config).items()) == expected

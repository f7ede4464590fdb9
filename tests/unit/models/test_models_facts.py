from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headway.cli.application import application
from headway.config import SHAPES, ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import complete
from headway.models.decoder import Decoder
from headway.models.facts import count_parameters, flops_per_token, kv_bytes_per_token
from headway.models.layers import attention


@pytest.mark.parametrize("name", SHAPES)
def test_counts_equal_the_modules(name: str) -> None:
    config = complete(ModelConfig(preset=name), 32_000)
    with torch.device("meta"):
        model = Decoder(config)
    counts = count_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.non_embedding == sum(p.numel() for p in model.layers.parameters()) + config.dim
    assert counts.embedding + counts.non_embedding == counts.total


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"head_dim": 24}, {"tie_embeddings": True}])
def test_counts_of_variants(changes: dict[str, Any]) -> None:
    config = ModelConfig(dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=96, vocab_size=128, **changes)
    with torch.device("meta"):
        model = Decoder(complete(config, 128))
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


def test_vocabulary_argument_wins() -> None:
    config = ModelConfig(preset="4m")
    with pytest.raises(ConfigError, match="not complete"):
        count_parameters(config)
    grown = count_parameters(config, 8192 + 64).total - count_parameters(config, 8192).total
    assert grown == 64 * 192


@pytest.mark.parametrize("tied", [False, True])
def test_flops_by_hand(tied: bool) -> None:
    config = ModelConfig(dim=8, layers=1, heads=2, ffn_dim=16, vocab_size=32, tie_embeddings=tied)
    weights = 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8 + 32 * 8  # attention, feed-forward, norms, vocabulary projection
    assert flops_per_token(config, 10) == 6 * weights + 12 * 1 * 2 * 4 * 10


def test_flops_count_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch counts in a forward and a backward pass, with attention as plain products that it can count."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(attention, "has_causal_products", lambda q, k: False)

    config = complete(ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, max_sequence_length=64), 256)
    model = Decoder(config)
    ids = torch.zeros((2, 64), dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids).sum().backward()
    norms = 6 * 5 * 64  # weights, but of no product
    assert counter.get_total_flops() / ids.numel() == flops_per_token(config, 64) - norms


def test_flops_of_attention_stop_at_the_window() -> None:
    config = ModelConfig(preset="4m", vocab_size=8192, sliding_window=256)
    full = ModelConfig(preset="4m", vocab_size=8192)
    assert flops_per_token(config, 4096) == flops_per_token(full, 256)
    assert flops_per_token(config, 128) == flops_per_token(full, 128)


def test_cache_bytes_are_those_of_a_cache() -> None:
    config = complete(ModelConfig(preset="1m"), 100)
    cache = Decoder(config).new_cache(rows=1, capacity=10, dtype=torch.bfloat16)
    assert kv_bytes_per_token(config) * 10 == (cache.keys.numel() + cache.values.numel()) * 2
    assert kv_bytes_per_token(ModelConfig(preset="1m")) == kv_bytes_per_token(config)


def _models(*arguments: str) -> str:
    app = application(["models"])
    result = CliRunner().invoke(app, ["models", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_verb_lists_every_shape() -> None:
    table = _models("--vocab", "128256")
    assert all(f"\n{name} " in table for name in SHAPES)
    assert "8.0B" in table and "70.6B" in table


def test_verb_gives_json() -> None:
    result = json.loads(_models("--json", "--vocab", "128256", "--sequence-length", "8192"))
    facts = {row["preset"]: row for row in result["models"]}
    assert facts["8b"]["parameters"] == 8_030_261_248  # Llama 3 8B
    assert facts["1b"]["parameters"] == 1_235_814_400  # Llama 3.2 1B
    assert facts["8b"]["flops_per_token"] == flops_per_token(ModelConfig(preset="8b", vocab_size=128256), 8192)

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model, complete
from headway.models.huggingface import export_model

SMALL = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "max_sequence_length": 32}


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    config = ModelConfig(**{**SMALL, "rope_theta": 500.0, "tie_embeddings": True, "norm_eps": 1e-4})
    export_model(build_model(config, vocab_size=100, seed=5), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_open_sizes_are_filled_in() -> None:
    config = complete(ModelConfig(dim=32, layers=2, heads=4, ffn_dim=64), 100)
    assert (config.vocab_size, config.kv_heads, config.head_dim) == (128, 4, 8)
    assert complete(config, 100) == config
    assert complete(ModelConfig(**SMALL, vocab_size=101), 100).vocab_size == 101


def test_too_small_vocabulary_is_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="99 is smaller than the tokenizer's of 100"):
        complete(ModelConfig(**SMALL, vocab_size=99), 100)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path"):
        complete(ModelConfig(from_pretrained=pretrained), 1000)


def test_shape_and_weights_come_from_the_checkpoint(pretrained: Path) -> None:
    config = ModelConfig(from_pretrained=pretrained, dropout=0.25)
    full = complete(config, 90)
    assert complete(full, 90) == full
    assert (full.dim, full.vocab_size, full.rope_theta, full.norm_eps) == (32, 128, 500.0, 1e-4)
    assert full.tie_embeddings and full.dropout == 0.25 and full.from_pretrained == pretrained
    model = build_model(config, vocab_size=90, seed=1)
    original = build_model(full.model_copy(update={"from_pretrained": None}), vocab_size=90, seed=5)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids), original.eval()(ids))


def test_contradiction_with_the_checkpoint_is_refused(pretrained: Path) -> None:
    with pytest.raises(ConfigError, match="dim is 64, but the checkpoint has 32"):
        complete(ModelConfig(from_pretrained=pretrained, dim=64), 90)


def test_without_first_weights_everything_else_is_ready() -> None:
    source = build_model(ModelConfig(**SMALL), vocab_size=100, seed=1)
    model = build_model(ModelConfig(**SMALL), vocab_size=100, seed=0, initialize=False)
    model.load_state_dict(source.state_dict())
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), source(ids))

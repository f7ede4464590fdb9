from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model, complete
from headway.models.huggingface.export import export_model

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


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10_000.0},  # the default, but somebody has asked for it
        {"norm_eps": 1e-6},
        {"sliding_window": 8},
        {"tie_embeddings": False},
        {"qk_norm": True},
        {"max_sequence_length": 16},
        {"experts": 4},
        {"shared_experts": 1},
        {"router_score": "sigmoid"},
    ],
    ids=str,
)
def test_what_a_checkpoint_fixes_cannot_be_chosen(pretrained: Path, changes: dict[str, Any]) -> None:
    key, value = next(iter(changes.items()))
    with pytest.raises(ConfigError, match=rf"model\.{key} is {value}, but the checkpoint has"):
        complete(ModelConfig(from_pretrained=pretrained, **changes), 90)


def test_rows_may_be_longer_than_the_checkpoint_says(pretrained: Path) -> None:
    full = complete(ModelConfig(from_pretrained=pretrained, max_sequence_length=100), 90)
    assert full.max_sequence_length == 100 and complete(full, 90) == full
    model = build_model(full, vocab_size=90, seed=1)
    ids = torch.arange(64)[None]
    with torch.no_grad():
        short = build_model(ModelConfig(from_pretrained=pretrained), vocab_size=90, seed=1)(ids[:, :20])
        torch.testing.assert_close(model(ids)[:, :20], short, rtol=0, atol=1e-5)


@pytest.mark.parametrize("completed_before", [True, False], ids=["of a run", "of headway config show"])
def test_a_config_that_a_program_wrote_names_every_key(pretrained: Path, completed_before: bool) -> None:
    config = ModelConfig(from_pretrained=pretrained, dropout=0.25, max_sequence_length=100)
    full = complete(config, 90)
    written = (full if completed_before else config).model_dump(mode="json")
    assert complete(ModelConfig.model_validate(written), 90) == full


def test_softmax_scores_of_a_checkpoint_get_no_bias(tmp_path: Path) -> None:
    export_model(build_model(ModelConfig(**SMALL, experts=4), vocab_size=100, seed=5), tmp_path / "checkpoint")
    assert complete(ModelConfig(from_pretrained=tmp_path / "checkpoint", balance_bias_rate=0.0), 90).experts == 4
    with pytest.raises(ConfigError, match="softmax scores"):
        complete(ModelConfig(from_pretrained=tmp_path / "checkpoint", balance_bias_rate=0.001), 90)


def test_without_first_weights_everything_else_is_ready() -> None:
    source = build_model(ModelConfig(**SMALL), vocab_size=100, seed=1)
    model = build_model(ModelConfig(**SMALL), vocab_size=100, seed=0, initialize=False)
    model.load_state_dict(source.state_dict())
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids), source(ids))

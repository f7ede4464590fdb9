"""Small models of the class of a pretrained one, and what they show of it before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.hub.sizes import model_without_weights
from headway.models.hub.small import small_instance
from headway.training.setup.model_proofs import prove_class
from support.families import write_family

transformers = pytest.importorskip("transformers")


def _config(folder: Path) -> ModelConfig:
    return ModelConfig(from_pretrained=str(folder), implementation="transformers", vocab_size=320)


def _large(folder: Path, kind: str, **values: Any) -> ModelConfig:
    """The config of a model that would be too large for the machine; there are no weights."""
    getattr(transformers, kind)(**values).save_pretrained(folder)
    return _config(folder)


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


LARGE: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("LlamaConfig", {}, 1),
    "windows in two of six layers": ("Gemma3TextConfig", {}, 6),
    "experts from the fourth layer on": ("DeepseekV3Config", {}, 4),
    "attention in every eighth layer": ("JambaConfig", {}, 5),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_becomes_a_small_one_with_every_kind_of_layer(name: str, tmp_path: Path) -> None:
    kind, values, layers = LARGE[name]
    config = _large(tmp_path, kind, **values)
    whole = model_without_weights(config)
    before = torch.random.get_rng_state()
    small = small_instance(config)
    assert small is not None and _parameters(small) < 2**26 < _parameters(whole)
    assert {type(part) for part in small.modules()} == {type(part) for part in whole.modules()}
    assert len(small.layers()) == layers
    assert small(torch.arange(8).unsqueeze(0)).isfinite().all()
    assert torch.equal(before, torch.random.get_rng_state()), "the random state of the process stays"
    again = small_instance(config)
    assert again is not None and all(map(torch.equal, small.parameters(), again.parameters()))


def test_a_model_without_a_small_one_is_left_to_its_weights(tmp_path: Path) -> None:
    """A width cannot be divided, and a layer has more parameters than are made."""
    odd = _large(tmp_path, "LlamaConfig", intermediate_size=11007)
    assert small_instance(odd) is None
    prove_class(odd, torch.device("cpu"))


@pytest.mark.parametrize("name", ["nemotron-h", "lfm-2", "jamba", "falcon-h1", "bloom", "mamba-2", "gpt-oss", "bamba"])
def test_a_class_that_mixes_packed_documents_is_found(name: str, tmp_path: Path) -> None:
    config = _config(write_family(name, tmp_path / name, initializer_range=0.02))
    (tmp_path / name / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"tried with random weights, does not tell packed documents apart: .*gradients"
    ):
        prove_class(config, torch.device("cpu"))


@pytest.mark.parametrize("name", ["qwen3", "llama-3", "mistral", "gemma-2", "gpt-2", "qwen3-moe", "deepseek-v3"])
def test_a_class_that_keeps_packed_documents_apart_passes(name: str, tmp_path: Path) -> None:
    config = _config(write_family(name, tmp_path / name))
    assert small_instance(config) is not None
    prove_class(config, torch.device("cpu"))


def test_a_large_class_that_leaks_is_found_without_weights(tmp_path: Path) -> None:
    config = _large(tmp_path, "JambaConfig")
    assert "hidden_size" in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match="JambaForCausalLM, tried with random weights"):
        prove_class(config, torch.device("cpu"))

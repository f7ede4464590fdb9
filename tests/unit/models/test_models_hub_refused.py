"""What is refused of a pretrained model and its adapter before anything is trained, and what is understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headway.config import ModelConfig
from headway.core.errors import CheckpointError, ConfigError
from headway.models.build import build_any_model, build_pretrained, complete
from headway.models.hub.new_tokens import extend_vocabulary
from headway.models.hub.streaming import build_for_shards
from headway.training.evaluation.inference import load_trained
from support.families import VOCAB, write_family

transformers = pytest.importorskip("transformers")


def _built(source: Path, **keys: Any) -> Any:
    config = ModelConfig(from_pretrained=source, implementation="transformers", **keys)
    return build_any_model(complete(config, VOCAB), vocab_size=VOCAB, seed=0)


def _adapted(model: nn.Module) -> set[str]:
    """Last names of the layers that have an adapter."""
    return {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("how", ["native", "transformers", "sharded", "loaded"])
def test_weights_that_are_not_finite_are_refused(how: str, value: float, tmp_path: Path) -> None:
    source = write_family("llama-3", tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name][3, 5] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(from_pretrained=source, implementation="native" if how == "native" else "transformers")
    with pytest.raises(CheckpointError, match=f"a weight is not finite: {name}"):
        if how == "sharded":
            model, read = build_for_shards(complete(config, VOCAB), seed=0, precision="fp32")
            for key, tensor in model.state_dict().items():
                read(key, tensor.shape)
        elif how == "loaded":
            load_trained(source)
        else:
            build_pretrained(config)


def test_misspelt_names_of_modules_are_refused_with_the_nearest(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    source = write_family("qwen3", tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"no module embed_token[\s\S]*also_trained[\s\S]*did you mean embed_tokens\?"
    ):
        _built(source, adapter={"rank": 2, "also_trained": ["embed_token_"]})
    with pytest.raises(ConfigError, match=r"no module q_porj[\s\S]*targets[\s\S]*did you mean q_proj\?"):
        _built(source, adapter={"rank": 2, "targets": ["v_proj", "q_porj"]})
    with pytest.raises(
        ConfigError, match=r"layers that can have one: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    ):
        _built(source, adapter={"rank": 2, "targets": ["query"]})
    assert _adapted(_built(source, adapter={"rank": 2, "targets": ["self_attn.q_proj"]})) == {"q_proj"}


def test_names_of_experts_one_by_one_still_adapt_stacked_ones(tmp_path: Path) -> None:
    """The names that folders have; transformers stacks these experts, and peft follows."""
    pytest.importorskip("peft")
    source = write_family("mixtral", tmp_path / "model")
    model = _built(source, adapter={"rank": 2, "targets": ["q_proj", "w1", "w2", "w3"]})
    assert {"q_proj", "experts"} <= _adapted(model)


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("nemotron-h", {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}),
        ("falcon-h1", {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("mamba-2", {"in_proj"}),
    ],
)
def test_all_linear_is_for_hybrid_models_too(name: str, adapted: set[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    source = write_family(name, tmp_path / "model")
    model = _built(source, adapter={"rank": 2})
    assert _adapted(model) == adapted
    with pytest.raises(ConfigError, match="out_proj") as caught:
        _built(source, adapter={"rank": 2, "targets": ["out_proj"]})
    assert "all-linear" not in str(caught.value) and "in_proj" in str(caught.value.fix)
    model.network.save_pretrained(tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert _adapted(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")) == adapted


def test_a_class_whose_prefix_names_nothing_has_its_layers(tmp_path: Path) -> None:
    model = _built(write_family("llama-4", tmp_path / "model")).eval()
    assert not hasattr(model.causal, model.causal.base_model_prefix)
    assert model.backbone is model.causal.model and model.layers() == [*model.causal.model.layers]
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert model.logits_are_projected(ids)
        model.loss_from_hidden = True
        loss = model(ids, ids.roll(-1, 1))
        model.loss_from_hidden = False
        torch.testing.assert_close(loss, model(ids, ids.roll(-1, 1)))


@pytest.mark.parametrize("family", ["llama-3", "gpt-2", "lfm-2"])
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_a_config_that_asks_for_endless_layers_is_refused_at_once(
    family: str, implementation: Any, tmp_path: Path
) -> None:
    source = write_family(family, tmp_path / "model")
    values = json.loads((source / "config.json").read_text())
    key = "n_layer" if family == "gpt-2" else "num_hidden_layers"
    assert key in values
    (source / "config.json").write_text(json.dumps({**values, key: 1_000_000_000}))
    with pytest.raises(ConfigError, match=f"{key} is 1000000000, more than any model has"):
        complete(ModelConfig(from_pretrained=source, implementation=implementation), VOCAB)
    with pytest.raises(ConfigError, match=f"{key} is 1000000000, more than any model has"):
        extend_vocabulary(source, tmp_path / "out", {VOCAB: [1]}, b"{}")
    nested = {**values, "text_config": {"num_hidden_layers": 10**9}}
    (source / "config.json").write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match="more than any model has"):
        complete(ModelConfig(from_pretrained=source, implementation="transformers"), VOCAB)
    (source / "config.json").write_text(json.dumps({**values, "layer_types": ["full_attention"] * 20_000}))
    with pytest.raises(ConfigError, match="layer_types has 20,000 entries"):
        complete(ModelConfig(from_pretrained=source, implementation="transformers"), VOCAB)

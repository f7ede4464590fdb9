"""Mixtures of experts against transformers itself, and those that no architecture computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.huggingface.checkpoint import import_model
from headway.models.huggingface.export import export_model

VOCAB = 96
SIZES = {"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 80, "max_sequence_length": 64, "init_std": 0.2}
MIXTURE = {"experts": 6, "experts_per_token": 2, "expert_ffn_dim": 40}
SIGMOID = {**MIXTURE, "router_score": "sigmoid", "shared_experts": 2, "dense_layers": 1}
EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": (MIXTURE, "MixtralForCausalLM"),
    "mixtral with a window": ({**MIXTURE, "sliding_window": 7, "tie_embeddings": True}, "MixtralForCausalLM"),
    "qwen3": ({**MIXTURE, "experts_per_token": 3, "dense_layers": 1, "qk_norm": True}, "Qwen3MoeForCausalLM"),
    "glm4": (SIGMOID, "Glm4MoeForCausalLM"),
    "qwen3 with biases, not normalised": (
        {
            **MIXTURE,
            "qk_norm": True,
            "qkv_bias": True,
            "output_bias": True,
            "normalize_router_weights": False,
            "dense_layers": 1,
        },
        "Qwen3MoeForCausalLM",
    ),
    "glm4.5": (
        {**SIGMOID, "rotary_fraction": 0.5, "head_dim": 16, "qkv_bias": True, "router_scale": 2.5},
        "Glm4MoeForCausalLM",
    ),
    "glm4 with qk_norm": ({**SIGMOID, "shared_experts": 1, "qk_norm": True, "head_dim": 20}, "Glm4MoeForCausalLM"),
}


def ours(**changes: Any) -> Decoder:
    """With norms and biases that show when they are left out."""
    model = build_model(ModelConfig(**{**SIZES, **changes}), vocab_size=VOCAB, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator))
        for mixture in model.mixtures():
            if mixture.bias_E is not None:
                mixture.bias_E.copy_(torch.rand(mixture.bias_E.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(ids)
    return output if isinstance(output, torch.Tensor) else output.logits


def load(folder: Path) -> Decoder:
    config, state = import_model(folder)
    model = build_model(config, vocab_size=1, seed=0, initialize=False).eval()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, logits_tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    changes, architecture = EXPORTS[name]
    model = ours(**changes)
    export_model(model, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == architecture
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(model), logits(theirs.eval()), rtol=logits_tolerance, atol=logits_tolerance)


@pytest.mark.parametrize("name", EXPORTS)
def test_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    model = ours(**EXPORTS[name][0])
    export_model(model, tmp_path / "out", max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    config, state = import_model(tmp_path / "out")
    # How a router is balanced is a matter of training, which a checkpoint does not tell; nor does one without dense
    # layers tell their width.
    pending_signals: dict[str, Any] = dict.fromkeys(("balance_loss", "balance_bias_rate", "router_z_loss"))
    if not config.dense_layers:
        pending_signals["ffn_dim"] = config.expert_ffn_dim
    assert config == model.config.model_copy(update=pending_signals)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_a_pretrained_mixture_is_trained_with_the_config_of_the_run(tmp_path: Path) -> None:
    model = ours(**SIGMOID)
    export_model(model, tmp_path / "out")
    config = ModelConfig(from_pretrained=tmp_path / "out", balance_bias_rate=0.5, router_z_loss=0.25)
    again = build_model(config, vocab_size=VOCAB, seed=5)
    assert (again.config.experts, again.config.router_score, again.config.dense_layers) == (6, "sigmoid", 1)
    layer = again.mixtures()[0]
    assert (layer.bias_rate, layer.z_weight, layer.balance_weight) == (0.5, 0.25, 0.0)
    assert torch.equal(logits(again.eval()), logits(model))
    with pytest.raises(ConfigError, match=r"model\.experts is 4, but the checkpoint has 6"):
        build_model(config.model_copy(update={"experts": 4}), vocab_size=VOCAB, seed=5)


HF_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
HF_MIXTURE = {"moe_intermediate_size": 40, "num_experts_per_tok": 3, "norm_topk_prob": True}


def glm(t: Any, **changes: Any) -> Any:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    sizes = {**HF_SIZES, **HF_MIXTURE, "head_dim": 12, "n_routed_experts": 6, "rope_parameters": rotary}
    model = t.Glm4MoeForCausalLM(t.Glm4MoeConfig(**{**sizes, **changes}))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.uniform_()
    return model


def qwen(t: Any, **changes: Any) -> Any:
    sizes = {**HF_SIZES, **HF_MIXTURE, "head_dim": 12, "num_experts": 6}
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**{**sizes, **changes}))


IMPORTS: dict[str, Callable[[Any], Any]] = {
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**HF_SIZES, num_local_experts=5)),
    "qwen3": lambda t: qwen(t, mlp_only_layers=[0]),
    "glm4": lambda t: glm(t, n_shared_experts=2, first_k_dense_replace=2),
    "glm4 with qk_norm": lambda t: glm(t, use_qk_norm=True),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_imports_what_transformers_saves(name: str, tmp_path: Path, logits_tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = IMPORTS[name](transformers).eval()
    theirs.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(theirs), rtol=logits_tolerance, atol=logits_tolerance)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: qwen(t, mlp_only_layers=[1]), r"without experts are \[1\]"),
        (lambda t: qwen(t, decoder_sparse_step=2), "decoder_sparse_step is 2"),
        (lambda t: glm(t, n_group=2, topk_group=1), "n_group is 2"),
    ],
)
def test_what_the_decoder_does_not_compute_is_not_imported(
    make: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    make(pytest.importorskip("transformers")).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**MIXTURE, "balance_bias_rate": 0.001}, "has a bias"),
        ({**MIXTURE, "shared_experts": 1}, "has shared experts"),
        ({**SIGMOID, "shared_experts": 0}, "has shared experts"),
        ({**SIGMOID, "experts": 1, "experts_per_token": 1}, "at least two experts"),
        ({**MIXTURE, "dense_layers": 1}, "experts in every layer"),
        ({**SIGMOID, "sliding_window": 8}, "only Mixtral has a sliding window"),
        ({**MIXTURE, "qk_norm": True, "sliding_window": 8}, "has both|sliding window"),
    ],
)
def test_what_transformers_cannot_compute_is_not_exported(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_model(ours(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_bias_keeps_its_precision(tmp_path: Path) -> None:
    model = ours(**SIGMOID)
    export_model(model, tmp_path / "out", dtype="bf16")
    tensors = load_file(tmp_path / "out/model.safetensors")
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, model.mixtures()[0].bias_E)
    assert {t.dtype for name, t in tensors.items() if not name.endswith("_bias")} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"

"""Conversion against transformers itself, and the checkpoints that must be refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headway.config import ModelConfig
from headway.core.errors import CheckpointError, ConfigError
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.huggingface import export as huggingface
from headway.models.huggingface.checkpoint import import_model
from headway.models.huggingface.export import export_model

VOCAB, LENGTH = 96, 40
SIZES = {"dim": 48, "layers": 2, "heads": 4, "ffn_dim": 80, "max_sequence_length": 64}
HF_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def _ids() -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def _ours(**changes: Any) -> Decoder:
    """With norms that are not 1, so that a norm left out or mixed up shows."""
    model = build_model(ModelConfig(**{**SIZES, "init_std": 0.2, **changes}), vocab_size=VOCAB, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand(parameter.shape, generator=generator))
    return model


def _logits(model: Any) -> torch.Tensor:
    # Transformers 5.24 cannot make a cache for a model without attention.
    cache = {} if isinstance(model, Decoder) else {"use_cache": False}
    with torch.no_grad():
        output = model(_ids(), **cache)
    return output if isinstance(output, torch.Tensor) else output.logits


def _load(config: ModelConfig, state: dict[str, torch.Tensor]) -> Decoder:
    model = build_model(config, vocab_size=1, seed=0, initialize=False).eval()
    model.load_state_dict(state)
    return model


SCALED = {"factor": 4.0, "original_length": 16}
#: Reordered rows round otherwise, which large logits would show.
PARTIAL = {"rotary_fraction": 0.5, "kv_heads": 2, "head_dim": 20, "init_std": 0.1}
HYBRID = {
    "layers": 4,
    "layer_pattern": "M*-M",
    "mamba": {"heads": 4, "head_dim": 8, "state_dim": 6, "groups": 2, "chunk": 16},
    "rotary_fraction": 0.0,
    "activation": "relu2",
    "kv_heads": 2,
    "init_std": 0.1,
}
GEMMA = {
    "norm": "rmsnorm1p",
    "post_norms": True,
    "activation": "geglu",
    "embedding_scale": 48**0.5,
    "tie_embeddings": True,
    "attention_pattern": "SF",
    "sliding_window": 7,
    "kv_heads": 2,
}
EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "untied": ({}, "LlamaForCausalLM"),
    "tied": ({"tie_embeddings": True, "kv_heads": 2}, "LlamaForCausalLM"),
    "grouped": ({"kv_heads": 1, "head_dim": 20, "rope_theta": 500_000.0}, "LlamaForCausalLM"),
    "window": ({"kv_heads": 2, "sliding_window": 7}, "MistralForCausalLM"),
    "qk_norm": ({"kv_heads": 2, "qk_norm": True, "norm_eps": 1e-6}, "Qwen3ForCausalLM"),
    "llama3 rope": (
        {"rope_theta": 500.0, "rope_scaling": {**SCALED, "kind": "llama3", "factor": 8}},
        "LlamaForCausalLM",
    ),
    "yarn": ({"rope_scaling": {**SCALED, "kind": "yarn"}}, "LlamaForCausalLM"),
    "yarn, no rounding": (
        {"rope_scaling": {**SCALED, "kind": "yarn", "attention_factor": 1.3, "truncate": False, "beta_fast": 8.0}},
        "LlamaForCausalLM",
    ),
    "linear rope": ({"rope_scaling": {"kind": "linear", "factor": 3.5}, "kv_heads": 2}, "LlamaForCausalLM"),
    "all biases": ({"qkv_bias": True, "output_bias": True, "ffn_bias": True, "kv_heads": 2}, "LlamaForCausalLM"),
    "qwen2": ({"qkv_bias": True, "kv_heads": 2, "tie_embeddings": True}, "Qwen2ForCausalLM"),
    "qwen3 with biases": ({"qk_norm": True, "qkv_bias": True, "output_bias": True}, "Qwen3ForCausalLM"),
    "glm": ({**PARTIAL, "qkv_bias": True}, "GlmForCausalLM"),
    "glm-4": ({**PARTIAL, "post_norms": True}, "Glm4ForCausalLM"),
    "nemotron": (
        {"norm": "layernorm1p", "activation": "relu2", "rotary_fraction": 0.5, "head_dim": 16, "kv_heads": 2},
        "NemotronForCausalLM",
    ),
    "nemotron with biases": (
        {"norm": "layernorm1p", "activation": "relu2", "qkv_bias": True, "output_bias": True, "ffn_bias": True},
        "NemotronForCausalLM",
    ),
    "nemotron-h": (HYBRID, "NemotronHForCausalLM"),
    "smollm3": ({"attention_pattern": "FN", "tie_embeddings": True}, "SmolLM3ForCausalLM"),
    "granite": (
        {"embedding_scale": 3.0, "residual_scale": 0.22, "attention_scale": 0.1, "logit_divisor": 1.7, "kv_heads": 2},
        "GraniteForCausalLM",
    ),
    "granite with the rest of its own": (
        {"residual_scale": 0.5, "qkv_bias": True, "output_bias": True, "ffn_bias": True},
        "GraniteForCausalLM",
    ),
    "olmo-2": (
        {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over": "projection", "kv_heads": 2},
        "Olmo2ForCausalLM",
    ),
    "gemma 2": (
        GEMMA | {"attention_softcap": 5.0, "logit_softcap": 3.0, "attention_scale": 20**-0.5},
        "Gemma2ForCausalLM",
    ),
    "gemma 2 without caps": (GEMMA | {"attention_pattern": None, "sliding_window": None}, "Gemma2ForCausalLM"),
    "gemma 3": (GEMMA | {"qk_norm": True, "local_rope_theta": 100.0}, "Gemma3ForCausalLM"),
    "gemma 3, scaled": (
        GEMMA
        | {
            "qk_norm": True,
            "local_rope_theta": 100.0,
            "rope_scaling": {"kind": "linear", "factor": 8.0},
            "tie_embeddings": False,
        },
        "Gemma3ForCausalLM",
    ),
    "gemma 3, one base": (
        GEMMA | {"qk_norm": True, "rope_scaling": {"kind": "linear", "factor": 2.0}},
        "Gemma3ForCausalLM",
    ),
    "mamba alone": ({**HYBRID, "layers": 2, "layer_pattern": "MM"}, "NemotronHForCausalLM"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, logits_tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    changes, architecture = EXPORTS[name]
    model = _ours(**changes)
    export_model(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == architecture
    assert theirs.dtype == torch.float32
    # Special tokens that are unknown must not become those of the first Llama.
    # The configs of GLM insert their own.
    assert theirs.config.eos_token_id is None or architecture.startswith("Glm")
    assert theirs.generation_config.bos_token_id is theirs.generation_config.eos_token_id is None
    torch.testing.assert_close(_logits(model), _logits(theirs), rtol=logits_tolerance, atol=logits_tolerance)


@pytest.mark.parametrize("name", EXPORTS)
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 30_000], ids=["one file", "shards"])
def test_round_trip_is_exact(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model = _ours(**EXPORTS[name][0])
    export_model(model, tmp_path / "out", max_shard_bytes=shard_bytes)
    shards = sorted(tmp_path.glob("out/*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 30_000) == (tmp_path / "out/model.safetensors.index.json").exists()
    assert all(shard.stat().st_size < 30_000 + 2_000 for shard in shards) or len(shards) == 1
    config, state = import_model(tmp_path / "out")
    assert config == model.config.model_copy(update={"preset": None})
    assert state.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
    assert torch.equal(_logits(_load(config, state)), _logits(model))


def _hf_llama(transformers: Any, **changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**HF_SIZES, **changes}))


GEMMA_SIZES = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": LENGTH // 4, "pad_token_id": None}

IMPORTS: dict[str, Callable[[Any], Any]] = {
    "llama": lambda t: _hf_llama(t),
    "tied grouped llama": lambda t: _hf_llama(t, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "other base": lambda t: _hf_llama(t, rope_parameters={"rope_type": "default", "rope_theta": 1234.0}),
    "other head width": lambda t: _hf_llama(t, head_dim=6),
    "mistral": lambda t: t.MistralForCausalLM(
        t.MistralConfig(**HF_SIZES, num_key_value_heads=2, sliding_window=LENGTH // 4)
    ),
    "mistral without window": lambda t: t.MistralForCausalLM(
        t.MistralConfig(**HF_SIZES, num_key_value_heads=2, sliding_window=None)
    ),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**HF_SIZES, num_key_value_heads=2, head_dim=16)),
    "scaled llama": lambda t: _hf_llama(
        t,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn of DeepSeek": lambda t: _hf_llama(
        t,
        rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "llama with biases": lambda t: _hf_llama(t, attention_bias=True, mlp_bias=True),
    "qwen2": lambda t: t.Qwen2ForCausalLM(t.Qwen2Config(**HF_SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
    "glm": lambda t: t.GlmForCausalLM(t.GlmConfig(**HF_SIZES, head_dim=16, pad_token_id=None)),
    "glm-4": lambda t: t.Glm4ForCausalLM(t.Glm4Config(**HF_SIZES, head_dim=16, pad_token_id=None)),
    "nemotron": lambda t: t.NemotronForCausalLM(t.NemotronConfig(**HF_SIZES, num_key_value_heads=2, head_dim=16)),
    "smollm3": lambda t: t.SmolLM3ForCausalLM(
        t.SmolLM3Config(**HF_SIZES, num_key_value_heads=2, no_rope_layer_interval=2, pad_token_id=None)
    ),
    "granite": lambda t: t.GraniteForCausalLM(
        t.GraniteConfig(
            **HF_SIZES,
            num_key_value_heads=2,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
        )
    ),
    "granite, its defaults": lambda t: t.GraniteForCausalLM(t.GraniteConfig(**{**HF_SIZES, "initializer_range": 0.1})),
    "olmo-2": lambda t: t.Olmo2ForCausalLM(t.Olmo2Config(**HF_SIZES, num_key_value_heads=2, pad_token_id=None)),
    "gemma 2": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**HF_SIZES, **GEMMA_SIZES)),
    "gemma 3": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**HF_SIZES, **GEMMA_SIZES, sliding_window_pattern=2)),
    "gemma 3, sliding alone": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**HF_SIZES, **GEMMA_SIZES)),
    "gemma 3, full alone": lambda t: t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(**HF_SIZES, **GEMMA_SIZES, layer_types=["full_attention"] * 2)
    ),
    "nemotron-h": lambda t: t.NemotronHForCausalLM(
        t.NemotronHConfig(
            **{key: value for key, value in HF_SIZES.items() if key != "num_hidden_layers"},
            num_key_value_heads=2,
            head_dim=16,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=6,
            n_groups=2,
            chunk_size=16,
            use_conv_bias=False,
            pad_token_id=None,
        )
    ),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_imports_what_transformers_saves(name: str, tmp_path: Path, logits_tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = IMPORTS[name](transformers).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = _load(*import_model(tmp_path))
    torch.testing.assert_close(_logits(model), _logits(theirs), rtol=logits_tolerance, atol=logits_tolerance)


def test_fifty_steps_of_training_follow_transformers(tmp_path: Path) -> None:
    """Gradients too: same weights, batches and AdamW give the same losses."""
    transformers = pytest.importorskip("transformers")
    model = _ours(kv_heads=2).train()
    export_model(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").train()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1) for m in (model, theirs)]
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(50):
        tokens = torch.randint(VOCAB, (4, 33), generator=generator)
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        mine = model(ids, targets) / targets.numel()
        other = torch.nn.functional.cross_entropy(theirs(ids).logits.flatten(0, 1), targets.flatten())
        for loss, optimizer in zip((mine, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((mine.item(), other.item()))
    assert losses[-1][0] < losses[0][0]
    assert max(abs(a - b) for a, b in losses) < 1e-4


def test_bf16_export(tmp_path: Path) -> None:
    model = _ours()
    export_model(model, tmp_path / "out", dtype="bf16")
    assert {t.dtype for t in load_file(tmp_path / "out/model.safetensors").values()} == {torch.bfloat16}
    _, state = import_model(tmp_path / "out")
    for key, tensor in model.state_dict().items():
        assert torch.equal(state[key], tensor.bfloat16().float())


def _tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_tokenizer_travels_along(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export_model(_ours(), tmp_path / "out", _tokenizer_folder(tmp_path / "tokenizer"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 2 and tokenizer.convert_tokens_to_ids("b") == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.eos_token_id == 2 and model.generation_config.eos_token_id == 2
    assert model.config.bos_token_id is None


def test_missing_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        export_model(_ours(), tmp_path / "out", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_an_earlier_one_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(_ours(), out, max_shard_bytes=20_000)
    export_model(_ours(), out)
    assert not (out / "model.safetensors.index.json").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no earlier export wrote"):
        export_model(_ours(), out)
    assert (out / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        export_model(_ours(), out / "notes.txt")
    (tmp_path / "empty").mkdir()
    export_model(_ours(), tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "out"]


def test_failed_export_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_model(_ours(), tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(huggingface, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        export_model(_ours(kv_heads=1), tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_transformers_cannot_compute_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qk_norm and sliding_window cannot be exported"):
        export_model(_ours(qk_norm=True, sliding_window=8), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    export_model(_ours(), tmp_path / "out")
    return tmp_path / "out"


def _edit(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "not supported: GPT2LMHeadModel"),
        ({"architectures": "absent", "model_type": "bert"}, "not supported: bert"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, r"scaled \(longrope\)"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"scaled \(dynamic\)"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'factor' is missing"),
        ({"hidden_size": "absent"}, "'hidden_size' is missing"),
        ({"hidden_size": 50}, "not divisible|make no decoder"),
    ],
    ids=str,
)
def test_other_variants_are_refused(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    if "hidden_size" in changes:
        changes = {**changes, "head_dim": "absent", "num_attention_heads": 7}
    with pytest.raises(ConfigError, match=message) as caught:
        import_model(_edit(checkpoint, **changes))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": "absent"},
        {"rope_parameters": "absent"},
        {"rope_parameters": "absent", "rope_scaling": None, "head_dim": None},
        {"architectures": "absent"},
        {"dtype": "absent", "torch_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_both_spellings_are_read(tmp_path: Path, spelling: dict[str, Any]) -> None:
    model = _ours(rope_theta=777.0)
    export_model(model, tmp_path / "out")
    config, _ = import_model(_edit(tmp_path / "out", **spelling))
    assert config == model.config


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}), "does not have"),
        (lambda t: t.update({"model.norm.weight": torch.ones(47)}), r"asks for floats \[48\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "I8"),
    ],
    ids=["missing", "bias", "shape", "integers"],
)
def test_weights_that_are_not_the_configs_are_refused(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_model(_rewrite(checkpoint, change))


def test_leftovers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    model = _ours(tie_embeddings=True)
    export_model(model, tmp_path / "out")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _, state = import_model(_rewrite(tmp_path / "out", add))
    assert state.keys() == model.state_dict().keys()
    with pytest.raises(CheckpointError, match="the two are different"):
        import_model(_rewrite(tmp_path / "out", lambda t: t["lm_head.weight"].add_(1)))


def test_damaged_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_model(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        import_model(checkpoint)
    with pytest.raises(ConfigError, match="no Hugging Face checkpoint"):
        import_model(tmp_path / "nowhere")


def test_a_run_is_to_be_exported_first(tmp_path: Path) -> None:
    run = tmp_path / "runs/x"
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    for named in (run, run / "checkpoints", run / "checkpoints/step-00000002"):
        with pytest.raises(ConfigError, match="no Hugging Face checkpoint") as caught:
            import_model(named)
        assert f"headway export {run}, then model.from_pretrained={run / 'export'}" in str(caught.value.fix)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_model(_ours(), out, max_shard_bytes=20_000)
    index = out / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    shard = content["weight_map"][name]
    shutil.copy(out / shard, tmp_path / shard)
    content["weight_map"][name] = f"../{shard}"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="index of the weights is damaged"):
        import_model(out)


def test_pickles_are_refused_without_being_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="there are no weights"):
        import_model(checkpoint)
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(CheckpointError, match="never unpickles"):
        import_model(checkpoint)

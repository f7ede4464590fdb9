"""What `config.json` may hold, and what transformers makes of the one that is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import ModelConfig
from headway.core.errors import CheckpointError, ConfigError
from headway.models.build import build_model
from headway.models.huggingface.checkpoint import import_model, read_model_config
from headway.models.huggingface.config import from_huggingface, to_huggingface
from headway.models.huggingface.export import export_model

SHAPE = {"dim": 48, "layers": 1, "heads": 4, "ffn_dim": 64, "max_sequence_length": 32, "vocab_size": 64}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _written(**changes: Any) -> dict[str, Any]:
    return {
        **to_huggingface(build_model(ModelConfig(**SHAPE), vocab_size=64, seed=0).config, "float32", SPECIAL),
        **changes,
    }


@pytest.mark.parametrize(
    "scaling", [{"type": "default", "rope_theta": 500.0}, {"rope_type": "default"}, {}, None], ids=str
)
def test_the_rotary_base_is_the_one_that_transformers_takes(scaling: dict[str, Any] | None) -> None:
    transformers = pytest.importorskip("transformers")
    values = _written(
        rope_theta=300.0, rope_parameters={"rope_type": "default", "rope_theta": 400.0}, rope_scaling=scaling
    )
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(values)))
    assert from_huggingface(values, "config.json").rope_theta == theirs.rope_parameters["rope_theta"]


def test_scaling_is_the_one_that_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    plain, scaled = ({"rope_type": kind, "rope_theta": 400.0, "factor": 2.0} for kind in ("default", "linear"))
    for first, second in ((plain, scaled), (scaled, plain), (None, scaled)):
        values = _written(rope_scaling=first, rope_parameters=second)
        theirs = transformers.LlamaConfig(**json.loads(json.dumps(values))).rope_parameters["rope_type"]
        ours = from_huggingface(values, "config.json").rope_scaling
        assert ("default" if ours is None else ours.kind) == theirs


@pytest.mark.parametrize("top", [{}, {"original_max_position_embeddings": 8}])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 16}])
def test_the_original_length_is_the_one_that_transformers_takes(top: dict[str, int], inner: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    rotary = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = _written(rope_parameters={**rotary, **inner}, **top)
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(values)))
    theirs.standardize_rope_params()  # as its rotary embedding does
    ours = from_huggingface(values, "config.json").rope_scaling
    assert ours is not None and ours.original_length == theirs.rope_parameters["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("hidden_size", 10**12),
        ("vocab_size", 10**23),
        ("intermediate_size", 2**62),
        ("max_position_embeddings", 10**18),
        ("num_attention_heads", 10**8),
        ("num_key_value_heads", 1e300),
        ("head_dim", 10**9),
        ("hidden_size", float("inf")),
        ("num_hidden_layers", float("nan")),
    ],
)
def test_sizes_that_no_model_has_are_refused_at_once(key: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a config or a module is made of them."""
    monkeypatch.setattr("headway.models.huggingface.config.ModelConfig", None)
    with pytest.raises(ConfigError, match=f"{key} is .* more than any model has"):
        from_huggingface(_written(**{key: value}), "config.json")


def test_sizes_that_are_absurd_together_are_refused() -> None:
    values = _written(hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=10_000, head_dim=64)
    with pytest.raises(ConfigError, match=r"a model of [0-9,]{20,} parameters"):
        from_huggingface(values, "config.json")
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
    }
    with pytest.raises(ConfigError, match="num_experts is"):
        from_huggingface(_written(**mixture, num_experts=10**9), "config.json")


def test_layers_that_the_weights_do_not_have_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(ModelConfig(**SHAPE), vocab_size=64, seed=0)
    export_model(model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 10_000}))
    monkeypatch.setattr("headway.models.huggingface.checkpoint.Decoder", None)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.9999\..* of the 10,000 layers"):
        import_model(tmp_path / "model")


def test_other_names_of_keys_are_read_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    mamba = {"heads": 4, "head_dim": 8, "state_dim": 6, "groups": 2}
    hybrid = {**SHAPE, "layer_pattern": "M", "mamba": mamba, "activation": "relu2", "rotary_fraction": 0.0}
    written = to_huggingface(build_model(ModelConfig(**hybrid), vocab_size=64, seed=0).config, "float32", SPECIAL)
    values = {**written, "mamba_dt_min": 0.02, "mamba_n_groups": 4, "mamba_chunk_size": 16}
    theirs = transformers.NemotronHConfig(**json.loads(json.dumps(values)))
    ours = from_huggingface(values, "config.json").mamba
    assert ours is not None and (ours.min_step, ours.groups, ours.chunk) == (0.02, 4, 16)
    assert (ours.min_step, ours.groups, ours.chunk) == (theirs.time_step_min, theirs.n_groups, theirs.chunk_size)


def test_an_architecture_of_another_type_is_refused() -> None:
    """Transformers would load the class of the type."""
    with pytest.raises(ConfigError, match="model_type is 'granite'"):
        from_huggingface(_written(model_type="granite"), "config.json")


@pytest.mark.parametrize(
    "junk",
    [
        {"architectures": 5},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": None, "model_type": ["llama"]},
        {"rope_scaling": "linear"},
        {"rope_parameters": 5},
        {"rope_parameters": {"rope_theta": "large"}},
        {"num_attention_heads": 0, "head_dim": None},
        {"hidden_size": float("inf")},
        {"vocab_size": {}},
    ],
    ids=str,
)
def test_junk_is_told_and_no_crash(junk: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        from_huggingface(_written(**junk), "config.json")


@pytest.mark.parametrize(
    "changes",
    [{"heads": 5, "kv_heads": 5, "head_dim": 12}, {"init_std": 1.5}, {"heads": 5, "head_dim": 12, "sliding_window": 7}],
    ids=str,
)
def test_transformers_loads_shapes_out_of_the_ordinary(changes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = build_model(ModelConfig(**{**SHAPE, **changes}), vocab_size=64, seed=1).eval()
    export_model(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    again = read_model_config(tmp_path / "out")
    assert again == model.config.model_copy(update={"init_std": min(model.config.init_std, 1.0)})


def test_a_large_vocabulary_beside_a_mistral_is_not_taken_for_an_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers warns of words split wrongly, and by a flag would split them otherwise."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(100_001)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    shape = {**SHAPE, "dim": 4, "heads": 2, "ffn_dim": 4, "vocab_size": 100_032, "sliding_window": 8}
    export_model(build_model(ModelConfig(**shape), vocab_size=100_001, seed=0), tmp_path / "out", folder)
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "propagate", True)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert "regex" not in caplog.text

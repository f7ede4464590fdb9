"""A folder is published only if it computes what the model computes that it was written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headway.config import ModelConfig
from headway.core.errors import CheckpointError
from headway.models.build import build_any_model, build_model, complete
from headway.models.hub.export import export_transformers_model
from headway.models.huggingface import export as native_export
from headway.models.huggingface.export import export_model
from headway.models.huggingface.folder import published
from headway.models.written import FolderProof, logits_as_stored, probe_logits
from support.families import VOCAB, write_family

transformers = pytest.importorskip("transformers")
SHAPE: dict[str, Any] = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": VOCAB}
ADAPTED = [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens", "q_proj"]]


def _built(source: Path, **keys: Any) -> Any:
    config = ModelConfig(from_pretrained=source, implementation="transformers", **keys)
    return build_any_model(complete(config, VOCAB), vocab_size=VOCAB, seed=0).eval()


def _adapted(source: Path, targets: list[str]) -> Any:
    """A model with adapters as after a long training."""
    model = _built(source, adapter={"rank": 4, "targets": targets})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.normal_(0.0, 0.1, generator=generator)
    return model


def _tokenizer(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("targets", ADAPTED, ids=["head", "embedding", "both"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapter_of_one_of_two_tied_matrices_merges(targets: list[str], dtype: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = _adapted(write_family("llama-tied", tmp_path / "model"), targets)
    export_transformers_model(model, tmp_path / "out", _tokenizer(tmp_path / "t"), dtype=dtype, merge=True)
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(out(ids).logits, model(ids), rtol=0, atol=1e-5 if dtype == "fp32" else 0.2)
    assert model.causal.config.tie_word_embeddings and not out.config.tie_word_embeddings
    ends = [
        p for name, p in model.named_parameters(remove_duplicate=False) if p.shape == (VOCAB, 32) and "lora" not in name
    ]
    assert len(ends) == 2 and ends[0] is ends[1], "the live model stays tied"


@pytest.mark.parametrize("reader", ["transformers", "native"])
def test_a_native_folder_with_other_weights_is_not_published(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(ModelConfig(**SHAPE), vocab_size=VOCAB, seed=0)
    if reader == "native":
        monkeypatch.setattr("headway.models.written.find_spec", lambda name: None)
    export_model(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    split = native_export.to_huggingface_tensors

    def swapped(*arguments: Any) -> Any:
        """As if the writer put gate and up projection of one layer in the wrong order."""
        tensors = dict(split(*arguments))
        gate, up = ("model.layers.1.mlp." + kind + "_proj.weight" for kind in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return tensors.items()

    monkeypatch.setattr(native_export, "to_huggingface_tensors", swapped)
    with pytest.raises(CheckpointError, match=r"does not compute what the model computes: .* \d+\.\d+% away"):
        export_model(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before, "the earlier export stays"
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "nemotron-h", "gemma-2", "glm-4-moe"])
def test_a_changed_weight_is_seen_in_a_folder_of_transformers(family: str, tmp_path: Path) -> None:
    model = _built(write_family(family, tmp_path / "model"))
    proof = FolderProof(tmp_path / "out", logits_as_stored(model))

    def write(changed: bool) -> None:
        with published(tmp_path / "out", proof) as building:
            model.network.save_pretrained(building)
            tensors = load_file(building / "model.safetensors")
            name = next(name for name, tensor in tensors.items() if "layers.1." in name and tensor.ndim == 2)
            tensors[name] = tensors[name].flip(0) if changed else tensors[name]
            save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})

    write(changed=False)
    with pytest.raises(CheckpointError, match="does not compute what the model computes"):
        write(changed=True)


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_values_of_layers_are_in_memory_one_layer_at_a_time(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        model: Any = build_model(ModelConfig(**SHAPE), vocab_size=VOCAB, seed=0).eval()
        layers = [*model.layers]
    else:
        model = _built(write_family("qwen3", tmp_path / "model", num_hidden_layers=3))
        layers = model.layers()
    before = dict(model.named_parameters(remove_duplicate=False))
    places: list[int] = []

    def count(*_: Any) -> None:
        places.append(sum(any(not isinstance(p, nn.Parameter) for p in layer.parameters()) for layer in layers))

    handles = [layer.register_forward_hook(count) for layer in layers]
    found = logits_as_stored(model, lambda name: torch.bfloat16)
    for handle in handles:
        handle.remove()
    assert places == [1, 1, 1]
    assert all(p is before[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    torch.testing.assert_close(found, probe_logits(model), rtol=0, atol=0)


def test_logits_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    model = build_model(ModelConfig(**SHAPE), vocab_size=VOCAB, seed=0)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        export_model(model, tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_an_adapter_alone_shares_the_model_that_it_adapts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    model = _adapted(write_family("qwen3", tmp_path / "model"), ["q_proj", "down_proj"])
    monkeypatch.setattr("headway.models.hub.streaming.read_tensor", lambda *_: pytest.fail("the model was read again"))
    export_transformers_model(model, tmp_path / "out", _tokenizer(tmp_path / "t"))
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")


def test_a_wrong_adapter_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    model = _adapted(write_family("qwen3", tmp_path / "model"), ["q_proj", "down_proj"])
    save = peft.PeftModel.save_pretrained

    def scaled_otherwise(self: Any, folder: Path, **options: Any) -> None:
        self.peft_config["default"].lora_alpha = 8
        save(self, folder, **options)

    monkeypatch.setattr(peft.PeftModel, "save_pretrained", scaled_otherwise)
    with pytest.raises(CheckpointError, match="does not compute what the model computes"):
        export_transformers_model(model, tmp_path / "out", _tokenizer(tmp_path / "t"))
    assert not (tmp_path / "out").exists()

"""Compressed models: transformers loads what is written, and the loss is that of the written folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from headway.config import ModelConfig, load_config
from headway.core.errors import CheckpointError, ConfigError
from headway.core.requirements import install_command
from headway.models.build import build_model
from headway.models.hub.compressed import Compression, is_quantized, linear_layers, prune
from headway.models.huggingface.export import export_model
from headway.training.evaluation.compression import compress_trained
from headway.training.evaluation.inference import continue_text, evaluate_trained, load_trained
from support.runs import headway_in_copy

transformers = pytest.importorskip("transformers")

IDS = torch.arange(1, 25).view(2, 12)


@pytest.fixture(scope="module")
def exported(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained decoder as a Hugging Face folder, with the corpus's tokenizer."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    shape = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, init_std=0.2)
    export_model(build_model(shape, vocab_size=300, seed=1), folder, corpus / "store/tokenizer")
    return folder


def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def small(corpus: Path) -> dict[str, Any]:
    return {"store_path": corpus / "store", "rows": 4, "sequence_length": 32}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_written_folder_is_the_quantized_model(kind: Any, corpus: Path, exported: Path, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    found = compress_trained(exported, tmp_path / "out", Compression(kind), **small(corpus))
    makes = {"int8": torchao.Int8WeightOnlyConfig, "fp8": torchao.Float8WeightOnlyConfig}
    settings = transformers.TorchAoConfig(makes[kind]())
    in_memory = logits(exported, dtype=torch.bfloat16, quantization_config=settings)
    assert torch.equal(logits(tmp_path / "out"), in_memory)
    model, name = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), "model.layers.1.mlp.down_proj"
    whole, restored = tensors(exported)[f"{name}.weight"], model.get_submodule(name).weight.dequantize().float()
    largest = whole.abs().amax(1, keepdim=True)
    # A step of 8 bits, or the last of three bits of a mantissa; the scale and the result are in bf16.
    limit = largest / 127 if kind == "int8" else whole.abs() / 16 + largest / 448
    error = (restored - whole).abs()
    assert error.max() > 0 and (error <= limit + whole.abs() / 128).all()
    # The losses are those of the two folders, by `headway eval`, and the sizes are what lies there.
    for side, folder in (("before", exported), ("after", tmp_path / "out")):
        assert found[side]["loss"] == evaluate_trained(folder, **small(corpus))["loss"]
        assert found[side]["bytes"] == (folder / "model.safetensors").stat().st_size
    linear = sum(w.numel() for name, w in tensors(exported).items() if "layers" in name and w.ndim == 2)
    total = sum(w.numel() for w in tensors(exported).values())
    assert found["after"]["quantized_share"] == linear / total and found["before"]["quantized_share"] == 0
    assert found["after"]["bytes"] < 0.5 * found["before"]["bytes"]
    text = continue_text(load_trained(tmp_path / "out"), "red", max_new_tokens=2, temperature=0, top_p=1, seed=0)
    assert "".join(text)


def test_a_quantized_model_is_refused(corpus: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    with pytest.raises(ConfigError, match="quantized already"):
        compress_trained(tmp_path, tmp_path / "out", Compression(prune="magnitude"), **small(corpus))


def test_an_adapter_in_a_folder_is_merged(corpus: Path, exported: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, lora_alpha=8, init_lora_weights=False)
    network = transformers.AutoModelForCausalLM.from_pretrained(exported)
    peft.get_peft_model(network, settings).save_pretrained(tmp_path / "adapter")
    shutil.copy(exported / "tokenizer.json", tmp_path / "adapter")
    wanted = Compression(prune="magnitude", sparsity=0.0, dtype="fp32")
    found = compress_trained(tmp_path / "adapter", tmp_path / "out", wanted, **small(corpus))
    before, after = tensors(exported), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == {f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)}
    assert found["after"]["loss"] == pytest.approx(found["before"]["loss"], abs=1e-4)


def test_tied_embeddings_stay_as_they_are(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    shape = ModelConfig(dim=32, layers=1, heads=2, ffn_dim=64, init_std=0.2, tie_embeddings=True)
    export_model(build_model(shape, vocab_size=300, seed=1), tmp_path / "model", corpus / "store/tokenizer")
    compress_trained(tmp_path / "model", tmp_path / "out", Compression("int8", dtype="fp32"), **small(corpus))
    name = "model.embed_tokens.weight"
    assert torch.equal(tensors(tmp_path / "out")[name], tensors(tmp_path / "model")[name])
    assert (logits(tmp_path / "out") - logits(tmp_path / "model")).abs().max() < 0.2


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_pruned_weights_are_the_smallest(corpus: Path, exported: Path, tmp_path: Path) -> None:
    found = compress_trained(
        exported, tmp_path / "out", Compression(prune="magnitude", sparsity=0.25, dtype="fp32"), **small(corpus)
    )
    before, after = tensors(exported), tensors(tmp_path / "out")
    zeros = 0
    for name, weight in before.items():
        if "layers" not in name or weight.ndim != 2:
            assert torch.equal(after[name], weight)
            continue
        limit = weight.abs().flatten().sort().values[weight.numel() // 4]
        assert torch.equal(after[name], torch.where(weight.abs() < limit, 0.0, weight))
        zeros += weight.numel() // 4
    assert found["after"]["zero_share"] == zeros / sum(w.numel() for w in before.values())
    assert found["after"]["loss"] != found["before"]["loss"] and found["after"]["bytes"] == found["before"]["bytes"]


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_two_of_four_neighbours_are_zero(quantize: Any, corpus: Path, exported: Path, tmp_path: Path) -> None:
    if quantize:
        pytest.importorskip("torchao")
    compress_trained(exported, tmp_path / "out", Compression(quantize, prune="2:4", dtype="fp32"), **small(corpus))
    assert is_quantized(tmp_path / "out") == bool(quantize)
    after = tensors(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj._weight_qdata" if quantize else "model.layers.1.mlp.down_proj.weight"
    assert ((after[name].view(-1, 4) == 0).sum(1) >= 2).all()
    kept = after[name].view(-1, 4) != 0
    groups = tensors(exported)["model.layers.1.mlp.down_proj.weight"].view(-1, 4).abs()
    assert not (kept & (groups < groups.sort(1).values[:, 2:3])).any()


def test_rows_that_are_no_groups_of_four_are_refused() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(6, 4), nn.Linear(6, 8)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    network = Network()
    assert list(linear_layers(network)) == ["inner"]
    with pytest.raises(ConfigError, match="groups of four") as caught:
        prune(network, "2:4", 0.5)
    assert "inner" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Compression(), "nothing"),
        (Compression("int4"), "CUDA GPU"),
        (Compression("int4", "2:4"), "keep zeros"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(wanted: Compression, words: str) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match=words):
        wanted.check(torch.device("cpu"))


@pytest.mark.parametrize("layout", ["plain", "preshuffled", "plain_int32", "tile_packed_to_4d"])
def test_torchao_makes_no_4_bit_weights_on_a_cpu(layout: str) -> None:
    """If this fails, torchao can do what is refused here."""
    torchao = pytest.importorskip("torchao.quantization")
    if torch.cuda.is_available():
        pytest.skip("layouts of GPUs can be made here")
    network = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
    settings = torchao.Int4WeightOnlyConfig(group_size=128, int4_packing_format=layout)
    with pytest.raises((ImportError, NotImplementedError, AssertionError, RuntimeError)):
        torchao.quantize_(network, settings)
        network(torch.ones(1, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("share", ["nan", "inf", "-inf", "-0.1", "1.1"])
def test_a_share_that_is_none_is_refused_in_three_lines(share: str, tmp_path: Path) -> None:
    code, printed = headway_in_copy(
        "compress", tmp_path, tmp_path / "out", "--prune", "magnitude", f"--sparsity={share}", gib=2.0
    )
    assert code == 2 and "between 0 and 1" in printed and f"where: --sparsity {share}" in printed, printed
    assert "fix:   --sparsity 0.5" in printed and not (tmp_path / "out").exists()


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.models.hub.compressed.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="torchao") as caught:
        Compression("int8").check(torch.device("cpu"))
    assert install_command("torchao") in str(caught.value)
    Compression(prune="2:4").check(torch.device("cpu"))


def test_a_run_is_compressed_by_the_command(tiny: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from headway.api import train

    config = load_config(tiny(train={"steps": 1}))
    train(config)
    out = tmp_path / "out"
    words = ("compress", config.run_directory, out, "--quantize", "int8", "--rows", "4", "--json")
    code, printed = headway_in_copy(*words, gib=2.0)
    assert code == 0, printed
    found = json.loads(printed[printed.index("{") :])
    assert found["step"] == 1 and found["before"]["loss"] == evaluate_trained(config.run_directory, rows=4)["loss"]
    assert found["after"]["loss"] == pytest.approx(found["before"]["loss"], abs=0.02)
    assert torch.isfinite(logits(out)).all() and (out / "tokenizer.json").is_file()
    code, printed = headway_in_copy("push", config.run_directory, "me/model", "--dry-run", gib=2.0)
    assert code == 0 and "nothing was sent" in printed, printed
    assert all(name in printed for name in ("README.md", "model.safetensors", "tokenizer.json", "config.json"))
    code, printed = headway_in_copy("push", out, "me/model", "--run", config.run_directory, "--dry-run", gib=2.0)
    assert code == 0 and "README.md" in printed and "model.safetensors" in printed, printed
    (out / "mine.txt").touch()
    code, printed = headway_in_copy(*words, gib=2.0)
    assert code == 2 and "no earlier export wrote" in printed


@pytest.mark.parametrize(
    ("wanted", "damage", "words"),
    [
        (Compression(prune="2:4"), "written", "does not compute what the model computes"),
        (Compression("int8"), "quantized", r"and 50\.00% is allowed"),
    ],
    ids=["written-otherwise", "quantized-otherwise"],
)
def test_a_folder_that_is_another_model_is_not_published(
    wanted: Compression,
    damage: str,
    words: str,
    corpus: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headway.training.evaluation import compression

    write = compression.write_compressed

    def otherwise(source: Path, folder: Path, *arguments: Any) -> torch.Tensor:
        """As if a library wrote, or quantized, other weights than it was given."""
        weights = load_file(source / "model.safetensors")
        changed = tmp_path / "changed"
        shutil.copytree(source, changed)
        for name in [name for name in weights if "down_proj" in name or "lm_head" in name]:
            weights[name] = weights[name].flip(0)
        save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
        expected = write(source if damage == "written" else changed, folder, *arguments)
        if damage == "written":
            shutil.copyfile(changed / "model.safetensors", folder / "model.safetensors")
        return expected

    monkeypatch.setattr(compression, "write_compressed", otherwise)
    if wanted.quantize is not None:
        pytest.importorskip("torchao")
    with pytest.raises(CheckpointError, match=words):
        compress_trained(exported, tmp_path / "out", wanted, **small(corpus))
    assert not (tmp_path / "out").exists()

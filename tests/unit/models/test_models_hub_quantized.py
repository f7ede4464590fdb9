"""Frozen matrices in few bits: the right levels, the right products, and runs that are kept like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import headway
from headway.config import Config, resolve
from headway.core.errors import ConfigError
from headway.models.hub.quantized import NF4_LEVELS, Kind, QuantizedLinear, dequantize, quantize
from support.families import CrashAt, write_family
from support.runs import config_values, state_hash, write_config, write_corpus
from support.runs import headway as command


def test_levels_are_quantiles_of_the_normal_distribution() -> None:
    """As appendix E of the paper has them: eight positive and seven negative ones, and zero."""
    end, normal = 0.9677083, NormalDist()

    def quantiles(count: int) -> list[float]:
        return [normal.inv_cdf(end + (0.5 - end) * index / count) for index in range(count)]

    above, below = quantiles(8), quantiles(7)
    levels = sorted([*above, 0.0, *(-value for value in below)])
    assert pytest.approx([value / levels[-1] for value in levels], abs=1e-6) == NF4_LEVELS


def test_every_value_gets_its_nearest_level() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 128)
    codes, scales = quantize(weight, "nf4")
    assert codes.shape == (6, 64) and codes.dtype == torch.uint8 and scales.shape == (6, 2)
    blocks = weight.view(6, 2, 64)
    largest = blocks.abs().amax(2, keepdim=True)
    levels = torch.tensor(NF4_LEVELS)
    nearest = levels[(blocks.unsqueeze(3) / largest.unsqueeze(3) - levels).abs().argmin(3)] * largest
    torch.testing.assert_close(dequantize(codes, scales, "nf4", torch.float32), nearest.view(6, 128))
    codes, scales = quantize(weight, "int8")
    error = (dequantize(codes, scales, "int8", torch.float32) - weight).abs()
    assert bool((error <= weight.abs().amax(1, keepdim=True) / 127 / 2 + 1e-7).all())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_layer_is_that_of_its_restored_matrix_and_keeps_only_codes(kind: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(128, 16)
    layer = QuantizedLinear(plain, kind)
    plain.weight.data = layer.weight
    x = torch.randn(3, 128, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.nbytes for t in saved) < plain.weight.nbytes / 3
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    expected = plain(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a token store, and a model whose rows fill the blocks of nf4."""
    folder = tmp_path_factory.mktemp("quantized")
    write_corpus(folder)
    assert command("data", "prepare", write_config(folder)).returncode == 0
    write_family("qwen3", folder / "model", hidden_size=64)
    return folder


def _model(folder: Path, **adapter: Any) -> dict[str, Any]:
    return {"from_pretrained": str(folder / "model"), "adapter": {"rank": 4, **adapter}}


def _config(folder: Path, run: str, model: dict[str, Any], **sections: Any) -> Config:
    values = config_values(folder, train={"steps": 4, "global_batch": 2, "micro_batch": 2}, **sections)
    return Config.model_validate({**values, "name": run, "model": model})


def test_a_run_below_which_the_model_has_4_bits_resumes_to_the_same_state(folder: Path) -> None:
    pytest.importorskip("peft")
    model = _model(folder, frozen_precision="nf4", dropout=0.1)
    whole = headway.train(_config(folder, "whole", model)).directory
    config = _config(folder, "crashed", model)
    with pytest.raises(RuntimeError, match="as if killed"):
        headway.train(config, callbacks=[CrashAt(3)])
    run = headway.train(config).directory
    assert state_hash(run) == state_hash(whole)
    newest = max((run / "checkpoints").iterdir())
    names = {name for file in newest.glob("*.safetensors") for name in load_file(file)}
    assert names and all("lora_" in name for name in names)
    other = headway.train(_config(folder, "unquantized", _model(folder, dropout=0.1))).directory
    assert state_hash(other) != state_hash(whole)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_codes_are_sharded_without_a_change_of_bits(precision: str, folder: Path) -> None:
    hashes = set()
    for workers, strategy in ((1, "single"), (2, "zero3"), (2, "ddp")):
        file = write_config(
            folder,
            train={"steps": 2, "global_batch": 4, "micro_batch": 2, "lanes": 2, "precision": precision},
            parallel={"workers": workers, "strategy": strategy, "threads": 1},
            name=f"sharded-{precision}-{strategy}",
            determinism="elastic",
        )
        values = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**values, "model": _model(folder, frozen_precision="nf4")}))
        done = command("train", file)
        assert done.returncode == 0, done.stderr
        hashes.add(state_hash(folder / "runs" / f"sharded-{precision}-{strategy}"))
    assert len(hashes) == 1


@pytest.mark.slow
def test_an_adapter_above_codes_trains_under_deepspeed_as_under_ddp(folder: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install '.[deepspeed]'")
    losses = {}
    for strategy in ("ddp", "deepspeed_zero2", "deepspeed_zero3"):
        file = write_config(
            folder,
            train={"steps": 4, "global_batch": 4, "micro_batch": 2, "lanes": 2},
            parallel={"workers": 2, "strategy": strategy, "threads": 1},
            name=f"codes-{strategy}",
        )
        values = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**values, "model": _model(folder, frozen_precision="nf4")}))
        done = command("train", file)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (folder / "runs" / f"codes-{strategy}" / "metrics.jsonl").read_text().splitlines())
        losses[strategy] = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses["ddp"]) == 4
    for found in losses.values():
        assert found == pytest.approx(losses["ddp"], abs=1e-5)


def test_norms_of_matrices_in_few_bits_are_refused() -> None:
    model = {"from_pretrained": "x", "adapter": {"method": "dora", "frozen_precision": "int8"}}
    with pytest.raises(ConfigError, match="dora needs the norms"):
        resolve(Config.model_validate({"model": model, "train": {"steps": 1}}))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_compiled_code_keeps_codes_for_the_backward_pass_and_no_restored_matrix(kind: Kind) -> None:
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(128, 256, bias=False), kind)
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)
    x = torch.randn(4, 128)

    def gradient(module: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, int]:
        inputs, kept = x.clone().requires_grad_(), [0]

        def count(tensor: torch.Tensor) -> torch.Tensor:
            kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            y = module(inputs)
        y.square().sum().backward()
        assert inputs.grad is not None
        return inputs.grad, kept[0] - y.nbytes

    eager, compiled_gradient = gradient(layer), gradient(compiled)
    assert torch.equal(eager[0], compiled_gradient[0])
    assert compiled_gradient[1] <= layer.codes.nbytes + layer.scales.nbytes

"""Models that are made without memory and read tensor by tensor: the same values, and never a whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from headway.config import Config
from headway.core.errors import CheckpointError
from headway.lab.bench.meter import live_bytes
from headway.models.build import complete
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.streaming import FirstValue, _DrawnOnTheHost, build_for_shards
from headway.models.hub.transformers_build import build_transformers_model
from headway.models.hub.transformers_model import TransformersModel
from headway.parallel.world import World
from headway.training.setup.precision import autocast
from support.families import VOCAB, write_family

pytest.importorskip("transformers")
SLOW = ("llama-3", "gemma-2", "gpt-2", "falcon-h1", "deepseek-v3", "qwen3-next")


def _config(source: Path, adapter: dict[str, Any] | None = None) -> Any:
    model = {"from_pretrained": str(source), "implementation": "transformers", "adapter": adapter}
    return complete(Config.model_validate({"model": model}).model, 1)


def _filled(model: TransformersModel, first_value: FirstValue) -> None:
    """Do what `materialize` does, without shards of which whole tensors could be hidden."""
    from headway.parallel.materialize import materialize

    materialize(model, World(0, 1, 0, torch.device("cpu")), first_value)
    if not model.has_adapter:
        model.causal.tie_weights()  # sharded parameters stay tied, others do not when memory is allocated


@pytest.mark.parametrize(
    ("family", "adapter", "precision"),
    [
        ("qwen3", None, "fp32"),
        ("nemotron-h", None, "fp32"),
        ("mixtral", None, "fp32"),
        ("qwen2", {"rank": 4, "also_trained": ["embed_tokens"]}, "fp32"),
        ("qwen3", {"rank": 4, "frozen_precision": "nf4"}, "bf16"),
        ("qwen2", {"rank": 4, "method": "dora"}, "fp32"),
        *[pytest.param(family, None, "fp32", marks=pytest.mark.slow) for family in SLOW],
    ],
)
def test_the_values_are_those_of_a_model_that_is_loaded_as_a_whole(
    family: str, adapter: dict[str, Any] | None, precision: str, tmp_path: Path
) -> None:
    config = _config(
        write_family(
            family, tmp_path / "model", hidden_size=64, **({} if family == "deepseek-v3" else {"head_dim": 16})
        ),
        adapter,
    )
    whole = build_transformers_model(config, seed=3)
    freeze_as_configured(whole, precision)
    model, first_value = build_for_shards(config, seed=3, precision=precision)
    assert all(p.is_meta for p in model.parameters())
    _filled(model, first_value)
    expected = whole.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(trained[name] == p.requires_grad for name, p in whole.named_parameters())
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    ids = torch.randint(VOCAB, (1, 8))
    with autocast(precision, torch.device("cpu")):
        assert torch.equal(model.eval()(ids), whole.eval()(ids))


def test_embeddings_in_fp32_are_not_rounded_whatever_the_config_says(tmp_path: Path) -> None:
    folder = write_family("qwen3", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))
    file = folder / "model.safetensors"
    save_file({name: t.float() * 1.001 for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    config = _config(folder, {"rank": 2})
    model, first_value = build_for_shards(config, seed=0, precision="bf16")
    _filled(model, first_value)
    whole = build_transformers_model(config, seed=0)
    freeze_as_configured(whole, "bf16")
    found, expected = (one.causal.get_input_embeddings().weight for one in (model, whole))
    assert found.dtype == expected.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(4, 4)}, "that the architecture does not have"),
        ({"model.norm.weight": torch.ones(1)}, "other sizes than config.json asks: model.norm.weight"),
    ],
)
def test_what_a_whole_model_is_refused_for_is_refused(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_family("qwen3", tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({**load_file(file), **changed}, file, metadata={"format": "pt"})
    model, first_value = build_for_shards(_config(folder), seed=0, precision="fp32")
    with pytest.raises(CheckpointError, match=reason):
        for name, tensor in model.state_dict().items():
            first_value(name, tensor.shape)


def test_a_drawn_value_is_not_that_of_a_later_tensor() -> None:
    drawn = _DrawnOnTheHost()
    with torch.device("meta"), drawn:
        kept = torch.nn.init.zeros_(torch.empty(3))
        for _ in range(100):  # all but the first are gone, and another tensor may get the number of one of them
            torch.nn.init.ones_(torch.empty(2))
    later = [torch.empty(2, device="meta") for _ in range(100)]
    assert all(drawn.value_of(tensor) is None for tensor in later)
    value = drawn.value_of(kept)
    assert value is not None and torch.equal(value, torch.zeros(3))


def _most_bytes(build: Any, file: Path) -> int:
    """Return the most bytes that were allocated at a time, without the file, which is mapped and not read."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = build()
    del kept
    inner: Any = profiler.profiler
    total = most = 0
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes() if abs(event.nbytes()) < file.stat().st_size else 0
        most = max(most, total)
    return most


def test_a_model_is_never_whole(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 512, "head_dim": 16}
    folder = write_family("qwen3", tmp_path / "model", **sizes)
    file = folder / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    config = _config(folder)

    def streamed() -> Any:
        model, first_value = build_for_shards(config, seed=0, precision="fp32")
        for name, tensor in model.state_dict().items():
            assert first_value(name, tensor.shape).shape == tensor.shape
        return model

    before = live_bytes()
    whole = build_transformers_model(config, seed=0)  # is read in threads, which the profiler does not see
    at_once = live_bytes() - before
    del whole
    assert at_once >= 1.8 * file.stat().st_size, "the control: all weights in fp32, from a file in bf16"
    assert _most_bytes(streamed, file) < at_once / 10

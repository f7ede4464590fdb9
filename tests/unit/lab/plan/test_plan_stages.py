"""The arithmetic against the real modules, optimizers and dealing-out."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from headway.config import Config, MeshShape, ModelConfig, find_strategy
from headway.lab.plan import stages
from headway.lab.plan.layout import Layout
from headway.lab.plan.stages import Stage, pipeline_stages
from headway.models.build import build_model
from headway.models.decoder import Decoder
from headway.models.facts import parameter_shapes
from headway.parallel.buckets import BUCKET_BYTES, BUCKETS_IN_FLIGHT
from headway.parallel.ownership import Ownership
from headway.parallel.replicas import Replicas
from headway.parallel.zero import _buckets_by_owner
from headway.training.optimizer import build_optimizer, materialize, optimizer_tensors
from headway.training.state import parameter_names

SHAPE: dict[str, Any] = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 160, "vocab_size": 640}


def layout(mesh: MeshShape, strategy: str = "zero3", micro_batches: int = 1) -> Layout:
    return Layout(find_strategy(strategy), mesh, 1, micro_batches, 1, "none", False, True)


def whole(model: ModelConfig) -> Stage:
    [stage] = pipeline_stages(run(), model, layout(MeshShape()))
    return stage


def run(**parallel: Any) -> Config:
    return Config.model_validate({"train": {"steps": 1, "sequence_length": 32}, "parallel": parallel})


EXPERTS = {"experts": 4, "shared_experts": 1, "dense_layers": 1, "expert_ffn_dim": 48}
OPTIMIZERS = ["adamw", "muon", "lion", "adafactor", *(["adamw8bit"] if find_spec("torchao") else [])]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, EXPERTS])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_moments_are_those_of_the_real_ones(changes: dict[str, Any], optimizer: str) -> None:
    config = Config.model_validate(
        {"model": {**SHAPE, **changes}, "optimizer": {"name": optimizer}, "train": {"steps": 1}}
    )
    model = build_model(config.model, vocab_size=640, seed=0)
    real = build_optimizer(config.optimizer.completed(), model, torch.device("cpu"))
    materialize(real)
    kept = optimizer_tensors(real, parameter_names(model))
    state = [t for name, t in kept.items() if t.ndim and ".qmap." not in name]  # no counts of steps, no shared tables
    stage = whole(config.model)
    assert stage.shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert stage.all == sum(p.nbytes for p in model.parameters())
    assert stage.largest_moments(1, optimizer) == sum(tensor.nbytes for tensor in state)


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("preset", ["4m", "125m"])
def test_parameters_are_dealt_out_as_zero_does(workers: int, preset: str) -> None:
    config = ModelConfig(preset=preset, vocab_size=8192)
    with torch.device("meta"):
        model = Decoder(config)
    owned = Ownership(model, lambda p: Replicas(None, 0, workers))
    expected = [[name for name, p in model.named_parameters() if owned.owner(p) == rank] for rank in range(workers)]
    assert [sorted(names) for names in whole(config).owners(workers)] == [sorted(names) for names in expected]


def test_shards_are_cut_along_the_first_dimension_as_torch_cuts_them() -> None:
    config = ModelConfig(**SHAPE)
    with torch.device("meta"):
        model = Decoder(config)
    for shards in (2, 3, 48, 100):
        first = sum(p.chunk(shards)[0].nbytes for p in model.parameters())
        assert whole(config).shard(shards) == first


def test_a_pipeline_has_all_layers_between_its_first_and_last_stage() -> None:
    config = ModelConfig(**{**SHAPE, "layers": 4, "vocab_size": 1280})
    mesh = MeshShape(pp=2)
    first, last = pipeline_stages(run(pipeline=2), config, layout(mesh, micro_batches=8))
    assert first.all + last.all == whole(config).all
    # The projection to the vocabulary is almost as much work as two layers.
    assert (first.layers, last.layers) == (3, 1)
    assert (first.ahead, last.ahead) == (1, 0)
    assert (first.received, last.received) == (1, 1)
    assert first.projection == last.table == 0
    split = pipeline_stages(run(pipeline=2, pipeline_split=[1, 3]), config, layout(mesh, micro_batches=8))
    assert [stage.layers for stage in split] == [1, 3]
    gpipe = pipeline_stages(run(pipeline=2, pipeline_schedule="gpipe"), config, layout(mesh, micro_batches=8))
    assert [stage.ahead for stage in gpipe] == [7, 7]
    interleaved = pipeline_stages(
        run(pipeline=2, pipeline_schedule="interleaved"), config, layout(mesh, micro_batches=8)
    )
    # Narayanan et al. 2021, figure 4: five passes of half a worker's layers, and three.
    assert [stage.ahead for stage in interleaved] == [2, 1]
    assert sum(stage.all for stage in interleaved) == whole(config).all
    assert [stage.received for stage in interleaved] == [3, 3]


def test_tensor_parallelism_cuts_matrices_and_no_vectors() -> None:
    config = ModelConfig(**SHAPE)
    [stage] = pipeline_stages(run(), config, layout(MeshShape(tp=2)))
    vectors = 4 * 64 * (2 * 3 + 1)
    assert stage.all - vectors == (whole(config).all - vectors) // 2


@pytest.mark.parametrize(("degrees", "shards", "parts"), [
    ({"dp_shard": 4}, 4, 4), ({"dp_shard": 4, "ep": 4}, 4, 4), ({"dp_shard": 4, "ep": 2}, 4, 4),
    ({"dp_shard": 2, "tp": 2}, 2, 4), ({"tp": 2}, 1, 2), ({"dp_shard": 2, "tp": 2, "ep": 4}, 2, 4),
])  # fmt: skip
def test_an_expert_is_divided_between_all_that_have_tokens(degrees: dict[str, int], shards: int, parts: int) -> None:
    """By expert first, then between those with the same ones: tensor-parallel workers too, which do not cut them."""
    config = ModelConfig(**{**SHAPE, **EXPERTS, "layers": 1, "dense_layers": 0, "shared_experts": 0})
    mesh = MeshShape(**degrees)
    [stage] = pipeline_stages(run(), config, layout(mesh))
    names = [name for name in stage.shapes if ".experts." in name]
    whole_ = sum(4 * math.prod(size) for name, size in parameter_shapes(config).items() if ".experts." in name)
    assert sum(stage._shard(name, shards) for name in names) == whole_ // parts
    assert mesh.expert_replicas * mesh.ep == parts


def test_buckets_are_as_large_as_those_that_are_sent() -> None:
    assert (stages.BUCKET_BYTES, stages.BUCKETS_IN_FLIGHT) == (BUCKET_BYTES, BUCKETS_IN_FLIGHT)


def test_gradients_wait_as_zero2_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the strategy's own buckets, filled one parameter after the other."""
    monkeypatch.setattr(stages, "BUCKET_BYTES", 2**16)
    config = ModelConfig(**SHAPE)
    with torch.device("meta"):
        model = Decoder(config)
    owned = Ownership(model, lambda p: Replicas(None, 0, 2))
    monkeypatch.setattr("headway.parallel.zero.BUCKET_BYTES", 2**16)
    names = {p: name for name, p in model.named_parameters()}
    real = [[names[p] for p in bucket] for bucket in _buckets_by_owner(model, owned)]
    stage = whole(config)
    owner = {name: rank for rank, owns in enumerate(stage.owners(2)) for name in owns}
    assert stage._buckets_by_owner(list(reversed(stage.bytes)), owner) == real and len(real) > 6
    once, again = (stage.handed_over(2, sums=sums) for sums in (False, True))
    assert list(once) == list(reversed(names.values()))
    assert max(once.values()) < stage.all and min(again.values()) >= stage.largest_share(2)
    last = next(reversed(once.values()))
    assert stage.largest_share(2) <= last <= stage.largest_share(2) + 3 * max(2**16, stage.largest)

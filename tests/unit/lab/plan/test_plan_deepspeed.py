"""DeepSpeed's settings, buffers, bucket and coordinator, in arithmetic and beside DeepSpeed itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import Config, ModelConfig, resolve
from headway.core.errors import ConfigError
from headway.lab.plan.accelerators import parse_machines
from headway.lab.plan.deepspeed import ZeroSettings
from headway.lab.plan.flat_buffers import Bucket, backwards, flat_groups, owned
from headway.lab.plan.layout import Layout
from headway.lab.plan.live_parameters import LiveParameters, live_parameters
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.memory_plan import MemoryPlan, Moment
from headway.lab.plan.speed import plan_speed
from headway.lab.plan.stages import Weight
from headway.models.facts import parameter_shapes

SHAPE: dict[str, Any] = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 160, "vocab_size": 640}
SHAPES = parameter_shapes(ModelConfig(**SHAPE))
BYTES = {name: 4 * torch.Size(size).numel() for name, size in SHAPES.items()}
ALL = sum(BYTES.values())


def config(stage: int, path: Path | None = None, workers: int = 8, **sections: Any) -> Config:
    model = {"preset": "350m", "vocab_size": 32000, **sections.get("model", {})}
    train = {"steps": 1, "sequence_length": 512, "global_batch": 2 * workers, "micro_batch": 2}
    parallel = {"strategy": f"deepspeed_zero{stage}", "workers": workers, "deepspeed_config": path}
    values = {"model": model, "train": {**train, **sections.get("train", {})}, "parallel": parallel}
    return resolve(Config.model_validate({**values, "optimizer": sections.get("optimizer", {})}))


def settings_file(folder: Path, **zero: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    return path


def plan(given: Config, workers: int = 8, device: str = "cuda") -> MemoryPlan:
    return plan_memory(given, given.model, Layout.of(given, workers), device)


def at(made: MemoryPlan, name: str) -> Moment:
    return max((moment for moment in made.moments if moment.name == name), key=lambda moment: moment.total)


# Settings


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_nobody_chooses_is_deepspeeds_own_choice(stage: int) -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(stage=stage)
    ours = ZeroSettings.of(config(stage), 8)
    assert (ours.reduce_bucket, ours.sub_group) == (zero.reduce_bucket_size, zero.sub_group_size)
    assert (ours.prefetch_bucket, ours.persistence) == (zero.prefetch_bucket_size, zero.param_persistence_threshold)
    assert (ours.max_live, ours.max_reuse) == (zero.max_live_parameters, zero.max_reuse_distance)
    assert ours.persistent_in_all >= zero.model_persistence_threshold
    assert ours.overlaps == zero.overlap_comm
    assert not ours.reduces_to_owner and zero.use_multi_rank_bucket_allreduce
    assert zero.contiguous_gradients and not (zero.round_robin_gradients or zero.zero_quantized_gradients)


def test_a_json_has_its_say_under_both_names(tmp_path: Path) -> None:
    path = settings_file(
        tmp_path,
        reduce_bucket_size=5e6,
        overlap_comm=None,
        param_persistence_threshold=7,
        stage3_max_reuse_distance=0,
        offload_param={"device": "cpu"},
    )
    found = ZeroSettings.of(config(3, path, optimizer={"offload": True}), 8)
    assert (found.reduce_bucket, found.persistence, found.max_reuse) == (5_000_000, 7, 0)
    assert found.overlaps and found.offloads and found.offloads_weights


@pytest.mark.parametrize(
    "zero", [{"contiguous_gradients": False}, {"zero_quantized_weights": True}, {"round_robin_gradients": True}]
)
def test_what_is_not_counted_is_refused(tmp_path: Path, zero: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not cover") as refused:
        plan(config(2, settings_file(tmp_path, **zero)))
    assert next(iter(zero)) in refused.value.what and refused.value.where == "parallel.deepspeed_config"


# Flat buffers and the bucket


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_parts_are_those_of_deepspeed(workers: int) -> None:
    stage12 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer
    groups = flat_groups(SHAPES, workers)
    expected = [0] * workers
    for group in groups:
        assert group.total % (2 * 4 * workers) == 0
        tensors = {name: torch.empty(SHAPES[name], device="meta") for name in group.places}
        for rank in range(workers):
            mine, *_ = stage12.get_partition_info(None, list(tensors.values()), group.share // 4, rank)
            expected[rank] += sum(tensor.nbytes for tensor in mine)
    assert owned(groups, workers) == expected


def test_what_does_not_fit_the_bucket_stays_outside_and_what_is_owned_is_put_aside() -> None:
    groups = flat_groups(SHAPES, 2)
    order = backwards(BYTES)
    whole = Bucket(order, groups, 0, ALL, offloads=False)
    # All of it waits in the bucket; when it is sent it is put together once more, then what is owned put aside.
    assert max(whole.extra.values()) == BYTES["head.weight"] and whole.last == ALL
    small = Bucket(order, groups, 1, BYTES["layers.0.attention.qkv.weight"] // 4)
    assert small.own == owned(groups, 2)[1]
    assert small.extra["embedding.weight"] >= small.own + BYTES["embedding.weight"]
    away = Bucket(order, groups, 1, BYTES["layers.0.attention.qkv.weight"] // 4, offloads=True)
    # In host memory, but for the moment in which its norm is taken in fp64.
    assert away.own == 0 and away.most == 3 * BYTES["head.weight"]
    last = Bucket(dict(BYTES), groups, 0, 1, all_there=True)
    assert last.most >= ALL + last.own  # none of them fits the bucket


# What is whole


def live(**changes: Any) -> LiveParameters:
    values: dict[str, Any] = {
        "tied": False, "recomputes": False, "workers": 2, "persistence": 0, "persistent_in_all": 2**62,
        "prefetch_bucket": 0, "max_live": 10**9, "max_reuse": 10**9, "gloo": False,
    }  # fmt: skip
    weights = tuple(Weight(name, count // 4) for name, count in BYTES.items())
    return live_parameters(weights, **{**values, **changes})


def test_a_small_model_is_whole_from_first_to_last_use() -> None:
    found = live()
    assert found.loss == ALL
    assert found.forward[0] < found.forward[1] < found.forward[2] < ALL
    assert found.backward[2] > found.backward[1] > found.backward[0] > BYTES["embedding.weight"]


def test_what_is_not_soon_used_again_is_let_go_of() -> None:
    found, head = live(max_reuse=1), BYTES["head.weight"]
    most = max(count for name, count in BYTES.items() if name.startswith("layers."))
    # The projection is the whole model's own, from the first call of a pass to its end.
    assert found.forward[1] == found.backward[1] == head + most
    assert live(max_reuse=1, recomputes=True).backward[1] == head + most
    layer = sum(count for name, count in BYTES.items() if name.startswith("layers.0."))
    # Within a layer whose forward pass is computed again everything is used again.
    assert live(max_reuse=layer // 2, recomputes=True).backward[1] >= head + layer


def test_what_is_fetched_ahead_lies_in_its_buffer_too() -> None:
    alone, ahead = live(max_reuse=1), live(max_reuse=1, prefetch_bucket=20_000)
    assert ahead.forward[1] >= alone.forward[1] + 4 * 20_000
    assert live(max_reuse=1, prefetch_bucket=20_000, max_live=1) == alone
    assert live(max_reuse=1, gloo=True).backward[1] > alone.backward[1]


def test_small_parameters_stay_whole() -> None:
    vectors = sum(count for name, count in BYTES.items() if len(SHAPES[name]) == 1)
    before = live(max_reuse=1).forward[1]
    assert live(max_reuse=1, persistence=64).forward[1] == before + vectors
    assert live(max_reuse=1, persistence=64, persistent_in_all=0).forward[1] == before


def test_frozen_weights_are_gathered_in_their_own_type_and_their_embedding_once() -> None:
    weights = tuple(
        Weight(name, count // 4, 4 if "norm" in name else 2, "norm" in name) for name, count in BYTES.items()
    )
    options: dict[str, Any] = {
        "tied": False, "recomputes": False, "workers": 2, "persistence": 0, "persistent_in_all": 2**62,
        "prefetch_bucket": 0, "max_live": 10**9, "gloo": False,
    }  # fmt: skip
    table = BYTES["embedding.weight"] // 2
    # The embedding is not used again, so it is released after the forward pass.
    whole = sum(weight.elements * weight.element_bytes for weight in weights)
    assert live_parameters(weights, max_reuse=10**9, **options).loss == whole - table
    found = live_parameters(weights, max_reuse=1, **options)
    assert found.embedding == BYTES["head.weight"] // 2 + table
    assert found.forward[0] < found.embedding and found.backward[0] < found.embedding


# Plans


def test_stages_divide_what_their_names_say() -> None:
    weights = 4 * 8 * 2 * 10  # what fills buffers up
    one, two, three = (plan(config(stage)) for stage in (1, 2, 3))
    elements = one.peak.weights // 4
    for made in (one, two, three):
        # A copy of the weights for the update, and two moments.
        assert abs(at(made, "update").optimizer - 12 * elements / 8) < weights
    assert at(one, "gradients sent").gradients >= 4 * elements
    assert at(two, "norm").gradients < 4 * elements / 8 + 4 * 32000 * 1024
    assert abs(at(three, "norm").gradients - 4 * elements / 8) < weights
    assert at(three, "loss").weights < one.peak.weights / 7.9
    assert at(three, "loss").communication > 4 * elements  # whole, besides the bucket
    lion = plan(config(1, optimizer={"name": "lion"}))
    assert abs(at(lion, "update").optimizer - 8 * elements / 8) < weights


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bucket_is_as_large_as_it_is_asked_to_be(stage: int, tmp_path: Path) -> None:
    name = "a layer, backward" if stage > 1 else "last layer, backward"
    large = at(plan(config(stage)), name)
    small = at(plan(config(stage, settings_file(tmp_path, reduce_bucket_size=60_000_000))), name)
    assert large.communication - small.communication == 4 * (500_000_000 - 60_000_000)
    twice = at(plan(config(stage, settings_file(tmp_path, reduce_bucket_size=60_000_000, overlap_comm=True))), name)
    assert twice.communication - small.communication == (0 if stage == 3 else 4 * 60_000_000)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_offloaded_leaves_the_gpu_and_stays_on_a_cpu(stage: int) -> None:
    away = config(stage, optimizer={"offload": True})
    assert all(moment.optimizer == 0 for moment in plan(away).moments)
    here, there = plan(away, device="cpu"), plan(config(stage), device="cpu")
    assert at(here, "update").optimizer > at(there, "update").optimizer


def test_weights_are_in_host_memory_if_a_json_says_so(tmp_path: Path) -> None:
    path = settings_file(tmp_path, offload_param={"device": "cpu"})
    assert at(plan(config(3, path, optimizer={"offload": True})), "loss").weights == 0


# Speed


def sent(stage: int, path: Path | None = None, **train: Any) -> float:
    given = config(stage, path, train={"precision": "bf16", **train})
    speed = plan_speed(given, given.model, Layout.of(given, 8), parse_machines("8xL4"))
    assert speed is not None
    return speed.communication_seconds


def test_each_stage_takes_the_time_of_what_it_sends(tmp_path: Path) -> None:
    ring = 4 * (at(plan(config(1)), "update").weights / 4) * 7 / 8 / (31.5e9 * 0.8)
    # Sums for all workers, twice the bytes of sums for their owner; then the weights.
    assert sent(1) == pytest.approx(3 * ring, rel=0.01)
    assert sent(2, global_batch=64) == pytest.approx(9 * ring, rel=0.01)  # in each of four micro-batches
    path = settings_file(tmp_path, use_multi_rank_bucket_allreduce=False)
    assert sent(2, path, global_batch=64) == pytest.approx(5 * ring, rel=0.01)
    path = settings_file(tmp_path, overlap_comm=True)
    assert sent(1, path) < sent(1)
    path = settings_file(tmp_path, overlap_comm=False)
    whole = sent(3, path)
    assert whole == pytest.approx(2 * ring, rel=0.1)  # to be gathered once, since all of it stays; and sums
    path = settings_file(tmp_path, overlap_comm=False, stage3_max_reuse_distance=0,
                         stage3_prefetch_bucket_size=0)  # fmt: skip
    assert sent(3, path) == pytest.approx(3 * ring, rel=0.15)

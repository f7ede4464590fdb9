"""The roofline against figures worked out by hand, and against what must be slower than what."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.config import Config, ModelConfig
from headway.models.facts import flops_per_token, parameter_shapes
from headway.models.shape import Shape
from headway.plan import speed as module
from headway.plan.accelerators import Machines, parse_machines
from headway.plan.layout import Layout
from headway.plan.speed import Speed, plan_speed


def config(strategy: str, workers: int, **sections: Any) -> Config:
    model = {"preset": "1b", "vocab_size": 32000}
    train = {"steps": 1, "sequence_length": 2048, "global_batch": 512, "micro_batch": 4, "precision": "bf16"}
    parallel = {"strategy": strategy, "workers": workers}
    values = {"model": model, "train": train, "parallel": parallel}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values else section
    return Config.model_validate(values).resolved()


def planned(strategy: str = "ddp", gpus: str = "8xH100", network: str | None = None, **sections: Any) -> Speed:
    machines = parse_machines(gpus, interconnect=network)
    return speed_of(config(strategy, machines.count, **sections), machines)


def speed_of(given: Config, machines: Machines) -> Speed:
    speed = plan_speed(given, given.model, Layout.of(given, machines.count), machines)
    assert speed is not None
    return speed


def test_products_take_their_flops_at_the_share_of_the_peak_that_is_assumed() -> None:
    model = ModelConfig(preset="1b", vocab_size=32000)
    # The causal mask halves attention, which MFU counts whole.
    attention = 12 * 16 * 2048 * 2048 / 2
    flops = (flops_per_token(model, 2048) - attention) * 512 * 2048
    assert planned("single", "1xH100").products_seconds == pytest.approx(flops / (989.5e12 * module.PRODUCT_SHARE))


def test_a_window_takes_the_pairs_that_it_leaves() -> None:
    length, window = 64, 16
    exact = sum(min(position + 1, window) for position in range(length)) / length
    parts = {"model": {"sliding_window": window}, "data": {"document_mask": True}}
    train = {"sequence_length": length, "micro_batch": 4}
    with_window, whole = (
        planned("single", "1xH100", train=train, **sections) for sections in (parts, {"data": parts["data"]})
    )
    model = ModelConfig(preset="1b", vocab_size=32000)
    shape = Shape.of(model)
    per_pair = 12 * shape.layers * shape.heads * shape.head_dim * 512 * length / (989.5e12 * module.PRODUCT_SHARE)
    fewer = (whole.products_seconds - with_window.products_seconds) / per_pair
    left = length / 2 - fewer
    assert left == pytest.approx(window - window**2 / (2 * length)) and left == pytest.approx(exact, abs=0.5)


def test_mfu_is_model_flops_over_the_peak_of_all() -> None:
    speed = planned()
    model = ModelConfig(preset="1b", vocab_size=32000)
    flops = flops_per_token(model, 2048) * speed.tokens_per_second
    assert speed.mfu == pytest.approx(flops / (8 * 989.5e12))
    assert speed.tokens_per_second == 512 * 2048 / speed.step_seconds
    assert 0.2 < speed.mfu < module.PRODUCT_SHARE


def test_computing_again_takes_a_third_more() -> None:
    full = planned(train={"activation_checkpointing": "full"})
    assert 1.25 < full.products_seconds / planned().products_seconds < 4 / 3
    assert full.mfu < planned().mfu


def test_8_bits_take_the_peak_of_8_bits_for_the_layers_and_of_16_for_the_rest() -> None:
    model = ModelConfig(preset="1b", vocab_size=32000)
    tokens, share = 512 * 2048, module.PRODUCT_SHARE
    shapes = parameter_shapes(model)
    linear = 6 * sum(math.prod(size) for name, size in shapes.items() if name.startswith("layers.") and len(size) > 1)
    rest = flops_per_token(model, 2048) - 12 * 16 * 2048 * 2048 / 2 - linear
    eight, half = (planned("single", "1xH100", train={"precision": p}) for p in ("fp8", "bf16"))
    assert eight.products_seconds == pytest.approx(tokens * (linear / 1979e12 + rest / 989.5e12) / share, rel=1e-3)
    # Rounding is paid for in memory traffic, which a compiler makes less of.
    assert eight.other_kernels_seconds > half.other_kernels_seconds
    compiled = [planned("single", "1xH100", train={"precision": p, "compile": True}) for p in ("fp8", "bf16")]
    paid = compiled[0].other_kernels_seconds - compiled[1].other_kernels_seconds
    assert 0 < paid < (eight.other_kernels_seconds - half.other_kernels_seconds) / 4
    full = planned("single", "1xH100", train={"precision": "fp8", "activation_checkpointing": "full"})
    assert 1.25 < full.products_seconds / eight.products_seconds < 4 / 3
    # Sharded weights travel in fp32: layers round them by themselves.
    slow = {p: planned("zero3", "16xL4", "ethernet-25", train={"precision": p}) for p in ("fp8", "bf16")}
    assert slow["fp8"].communication_seconds > 1.3 * slow["bf16"].communication_seconds


def test_selective_checkpointing_computes_every_second_product_again() -> None:
    dense, selective = (
        planned("single", "1xH100", train={"activation_checkpointing": mode}) for mode in ("none", "selective")
    )
    shapes = parameter_shapes(ModelConfig(preset="1b", vocab_size=32000))
    again = sum(math.prod(size) for name, size in shapes.items() if name.endswith(("output.weight", "down.weight")))
    seconds = 2 * again * 512 * 2048 / (989.5e12 * module.PRODUCT_SHARE)
    assert selective.products_seconds - dense.products_seconds == pytest.approx(seconds)


def test_a_ring_takes_its_bytes_through_the_narrowest_link() -> None:
    # Gradients hide behind the backward pass, the weights that come after the update behind nothing.
    weights = 4 * sum_of_parameters()
    slow, fast = planned("zero1", "2xL4"), planned("zero1", "2xH100")
    once = weights / 2 / (31.5e9 * module.LINK_SHARE)
    assert slow.communication_seconds == pytest.approx(once, rel=0.05)
    assert fast.communication_seconds == pytest.approx(weights / 2 / (450e9 * module.LINK_SHARE), rel=0.05)


def sum_of_parameters() -> int:
    from headway.models.facts import count_parameters

    return count_parameters(ModelConfig(preset="1b", vocab_size=32000)).total


def test_slow_networks_cost_time_and_copies_on_each_machine_save_it() -> None:
    fast, slow = planned("zero3", "64xH100"), planned("zero3", "64xH100", "ethernet-100")
    assert slow.step_seconds > 2 * fast.step_seconds
    copies = planned("hsdp", "64xH100", "ethernet-100", parallel={"replicate": 8})
    assert copies.step_seconds < slow.step_seconds


def test_tensor_context_and_pipeline_parallelism_cost_what_they_send_or_wait() -> None:
    alone = planned("ddp")
    for degree in ("tensor", "context"):
        assert planned("ddp", parallel={degree: 2}).communication_seconds > alone.communication_seconds
    assert alone.bubble_seconds == 0
    pipeline = planned("ddp", parallel={"pipeline": 2})
    layout = Layout.of(config("ddp", 8, parallel={"pipeline": 2}), 8)
    assert 0 < pipeline.bubble_seconds < pipeline.step_seconds / layout.micro_batches


def test_elastic_sums_hide_behind_nothing() -> None:
    assert planned(determinism="elastic").communication_seconds > planned().communication_seconds


@pytest.mark.parametrize("gpus", ["8xT4", "8xV100"])
def test_no_speed_without_a_peak(gpus: str) -> None:
    machines = parse_machines(gpus)
    given = config("ddp", 8)
    assert plan_speed(given, given.model, Layout.of(given, 8), machines) is None
    given = config("ddp", 8, train={"precision": "fp32"})
    assert plan_speed(given, given.model, Layout.of(given, 8), machines) is not None


def test_no_speed_of_an_unknown_accelerator() -> None:
    given = config("ddp", 8)
    assert plan_speed(given, given.model, Layout.of(given, 8), parse_machines("8xFoo", memory_gib=80)) is None

"""The roofline against figures worked out by hand, and against what must be slower than what."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headway.config import Config, ModelConfig, resolve
from headway.lab.plan import speed as module
from headway.lab.plan.accelerators import KNOWN, Machines, parse_machines
from headway.lab.plan.layout import Layout
from headway.lab.plan.speed import Speed, plan_speed
from headway.models.facts import flops_per_token, parameter_shapes
from headway.models.shape import Shape


def config(strategy: str, workers: int, **sections: Any) -> Config:
    model = {"preset": "1b", "vocab_size": 32000}
    train = {"steps": 1, "sequence_length": 2048, "global_batch": 512, "micro_batch": 4, "precision": "bf16"}
    parallel = {"strategy": strategy, "workers": workers}
    values = {"model": model, "train": train, "parallel": parallel}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values else section
    return resolve(Config.model_validate(values))


def planned(strategy: str = "ddp", gpus: str = "8xH100", network: str | None = None, **sections: Any) -> Speed:
    machines = parse_machines(gpus, interconnect=network)
    return speed_of(config(strategy, machines.count, **sections), machines)


def speed_of(given: Config, machines: Machines) -> Speed:
    speed = plan_speed(given, given.model, Layout.of(given, machines.count), machines)
    assert speed is not None
    return speed


@pytest.mark.parametrize("name", ["H100", "A100", "L4"])
def test_products_and_attention_take_their_flops_at_their_shares_of_the_peak(name: str) -> None:
    model, card = ModelConfig(preset="1b", vocab_size=32000), KNOWN[name]
    peak = card.peak_flops("bf16")
    assert peak is not None
    attention = 12 * 16 * 2048 * 2048  # as MFU counts it
    flops, tokens = flops_per_token(model, 2048) - attention, 512 * 2048
    speed, full = (
        planned("single", f"1x{name}", train={"activation_checkpointing": mode}) for mode in ("none", "full")
    )
    assert speed.products_seconds == pytest.approx(flops * tokens / (peak * card.product_share))
    # The causal mask halves it; its backward pass computes the scores again, and checkpointing its forward pass.
    forward = attention / 3 / 2 * tokens / (peak * card.attention_share)
    assert speed.attention_seconds == pytest.approx(3.5 * forward)
    assert full.attention_seconds == pytest.approx(4.5 * forward)


def test_cards_have_shares_of_their_own() -> None:
    assert KNOWN["A100"].product_share > KNOWN["H100"].product_share
    assert KNOWN["A100"].attention_share > KNOWN["H100"].attention_share


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
    per_pair = 14 * shape.layers * shape.heads * shape.head_dim * 512 * length
    per_pair /= 989.5e12 * KNOWN["H100"].attention_share
    fewer = (whole.attention_seconds - with_window.attention_seconds) / per_pair
    left = length / 2 - fewer
    assert left == pytest.approx(window - window**2 / (2 * length)) and left == pytest.approx(exact, abs=0.5)


def test_mfu_is_model_flops_over_the_peak_of_all() -> None:
    speed = planned()
    model = ModelConfig(preset="1b", vocab_size=32000)
    flops = flops_per_token(model, 2048) * speed.tokens_per_second
    assert speed.mfu == pytest.approx(flops / (8 * 989.5e12))
    assert speed.tokens_per_second == 512 * 2048 / speed.step_seconds
    assert 0.2 < speed.mfu < KNOWN["H100"].product_share


def test_computing_again_takes_a_third_more() -> None:
    full = planned(train={"activation_checkpointing": "full"})
    assert 1.25 < full.products_seconds / planned().products_seconds < 4 / 3
    assert full.mfu < planned().mfu


def test_8_bits_take_the_peak_of_8_bits_for_the_layers_and_of_16_for_the_rest() -> None:
    model = ModelConfig(preset="1b", vocab_size=32000)
    tokens, share = 512 * 2048, KNOWN["H100"].product_share
    shapes = parameter_shapes(model)
    linear = 6 * sum(math.prod(size) for name, size in shapes.items() if name.startswith("layers.") and len(size) > 1)
    rest = flops_per_token(model, 2048) - 12 * 16 * 2048 * 2048 - linear
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
    once = {"reduce_every": "step"}
    slow = {p: planned("zero3", "16xL4", "ethernet-25", train={"precision": p}, parallel=once) for p in ("fp8", "bf16")}
    assert slow["fp8"].communication_seconds > 1.3 * slow["bf16"].communication_seconds


def test_selective_checkpointing_computes_every_second_product_again() -> None:
    dense, selective = (
        planned("single", "1xH100", train={"activation_checkpointing": mode}) for mode in ("none", "selective")
    )
    shapes = parameter_shapes(ModelConfig(preset="1b", vocab_size=32000))
    again = sum(math.prod(size) for name, size in shapes.items() if name.endswith(("output.weight", "down.weight")))
    seconds = 2 * again * 512 * 2048 / (989.5e12 * KNOWN["H100"].product_share)
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


def test_several_stages_per_worker_wait_less_and_send_more() -> None:
    pipeline: dict[str, Any] = {"pipeline": 2}
    more = {**pipeline, "pipeline_schedule": "interleaved", "virtual_stages": 4}
    plain, interleaved = planned("ddp", parallel=pipeline), planned("ddp", parallel=more)
    assert interleaved.bubble_seconds == pytest.approx(plain.bubble_seconds / 4)
    assert interleaved.communication_seconds > plain.communication_seconds
    # A pipeline that runs empty at the end of every lane waits for each.
    lanes = planned("ddp", parallel=pipeline, train={"lanes": 8})
    assert lanes.bubble_seconds == pytest.approx(2 * plain.bubble_seconds)


def test_stages_on_other_machines_send_through_the_network() -> None:
    near = planned("single", "2xH100", parallel={"pipeline": 2})
    machines = parse_machines("2xH100", per_node=1, interconnect="ethernet-25")
    far = speed_of(config("single", 2, parallel={"pipeline": 2}), machines)
    assert far.communication_seconds > 10 * near.communication_seconds > 0


def test_context_parallel_workers_take_kernels_with_masks() -> None:
    whole, shared = planned("zero3", "2xH100"), planned("zero3", "2xH100", parallel={"context": 2})
    assert shared.attention_seconds == pytest.approx(whole.attention_seconds / module.MASKED_SHARE)


def test_reducing_in_every_micro_batch_sends_more() -> None:
    each, once = (
        planned("zero3", "64xH100", "ethernet-100", parallel={"reduce_every": every})
        for every in ("micro_batch", "step")
    )
    assert each.communication_seconds > once.communication_seconds


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

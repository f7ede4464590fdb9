"""What is taken, why, and that it can be typed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from headway.config import DEEPSPEED, Config, override, resolve
from headway.core.errors import ConfigError
from headway.lab.plan import recommend as module
from headway.lab.plan.accelerators import parse_machines, this_machine
from headway.lab.plan.layout import Layout
from headway.lab.plan.memory import plan_memory
from headway.lab.plan.prepare import Plan, make_plan
from headway.lab.plan.recommend import Planner, command, usable_bytes


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here or not, plans are the same."""
    monkeypatch.setattr(module, "find_spec", lambda name: None)


def config(preset: str, **sections: Any) -> Config:
    train = {"tokens": "1B", "sequence_length": 2048, "global_batch": 512, "micro_batch": 4, "precision": "bf16"}
    values: dict[str, Any] = {"model": {"preset": preset, "vocab_size": 32000}, "train": train}
    for name, section in sections.items():
        values[name] = {**values[name], **section} if name in values else section
    return resolve(Config.model_validate(values))


@cache
def small() -> Plan:
    """Of a small model on one machine, for the tests that ask it different questions."""
    return planned("125m", "8xH100")


def planned(preset: str, gpus: str, **sections: Any) -> Plan:
    return make_plan(config(preset, **sections), parse_machines(gpus))


def test_a_small_model_is_trained_in_the_simplest_way() -> None:
    made = small()
    assert made.recommendation.option is not None
    assert made.recommendation.option.overrides[:2] == (
        "parallel.strategy=ddp",
        "train.activation_checkpointing=none",
    )


def test_a_large_model_is_sharded_and_what_does_not_fit_is_named() -> None:
    made = planned("8b", "8xH100")
    chosen = made.recommendation.option
    assert chosen is not None and chosen.strategy in ("zero3", "zero2") and chosen.fits
    assert "ddp (checkpointing none)" in made.recommendation.reason
    assert not next(option for option in made.table if option.strategy == "ddp").fits


@pytest.mark.slow
def test_the_hours_of_a_ramp_are_those_of_its_steps() -> None:
    """Steps of an eighth of the batch have as large an update, so the same tokens take longer."""
    ramp = [{"global_batch": 64, "until": "400M tokens"}]
    hours = []
    for train in ({}, {"batch_ramp": ramp}, {"global_batch": 64}):
        made = planned("125m", "8xH100", train=train)
        option = next(o for o in made.table if o.strategy == "ddp" and o.layout)
        hours.append(made.hours(option))
    whole, ramped, small = (value or 0.0 for value in hours)
    assert whole < ramped < small
    assert ramped == pytest.approx(0.6 * whole + 0.4 * small, rel=0.01)


@pytest.mark.parametrize(("preset", "gpus"), [("125m", "8xL4"), ("1b", "8xA100-40GB"), ("8b", "64xH100")])
def test_what_is_recommended_is_a_config_that_fits_and_nothing_faster_does(preset: str, gpus: str) -> None:
    given, machines = config(preset), parse_machines(gpus)
    made = make_plan(given, machines)
    chosen, usable = made.recommendation.option, usable_bytes(machines)
    assert chosen is not None and chosen.speed is not None and usable is not None
    typed = override(given, [*chosen.overrides, f"parallel.workers={machines.count}"])
    layout = Layout.of(typed, machines.count)
    assert layout == chosen.layout
    assert plan_memory(typed, typed.model, layout, "cuda").peak_bytes <= usable
    rivals = [option.speed.step_seconds for option in made.table if option.fits and option.speed]
    assert chosen.speed.step_seconds <= 1.021 * min(rivals, default=chosen.speed.step_seconds)


@pytest.mark.slow
def test_where_nothing_fits_it_is_said_what_would() -> None:
    # Nothing but more accelerators helps this optimizer.
    alone: dict[str, Any] = {"optimizer": {"name": "adafactor"}, "parallel": {"tensor": 1, "pipeline": 1}}
    made = planned("13b", "2xA100-40GB", **alone)
    assert made.recommendation.option is None
    reason = made.recommendation.reason
    assert "nothing fits" in reason
    # What it promises holds with the config's own batch, and half as many do not do.
    found = re.search(r"; (\d+) of these accelerators would suffice, with (.+)$", reason)
    assert found is not None, reason
    there = override(config("13b", **alone), found[2].split())
    for count, fits in ((int(found[1]), True), (int(found[1]) // 2, False)):
        made = make_plan(there, parse_machines(f"{count}xA100-40GB"))
        assert any(option.fits for option in made.table) is fits, count


def test_without_a_speed_the_simplest_that_fits_is_taken() -> None:
    made = make_plan(config("125m"), parse_machines("8xFoo", memory_gib=40))
    chosen = made.recommendation.option
    assert chosen is not None and chosen.strategy == "ddp" and chosen.speed is None
    assert made.hours(chosen) is None and made.energy_kwh(chosen) is None and made.mfu(chosen) is None


def test_time_energy_and_cost_follow_from_the_speed() -> None:
    made = planned("125m", "8xH100", telemetry={"usd_per_hour": 20.0})
    option = made.table[0]
    hours = made.hours(option)
    assert option.speed is not None and hours == pytest.approx(made.tokens / option.speed.tokens_per_second / 3600)
    assert made.energy_kwh(option) == pytest.approx(hours * 8 * 0.7)
    assert made.cost_usd(option) == pytest.approx(hours * 20)
    assert small().cost_usd(option) is None


def test_a_measured_speed_takes_the_place_of_the_roofline() -> None:
    given = config("125m", parallel={"strategy": "zero3", "workers": 8}, train={"activation_checkpointing": "full"})
    made = make_plan(given, parse_machines("8xH100"), measured_tokens_per_second=1e6)
    own = next(o for o in made.table if o.way == ("parallel.strategy=zero3", "train.activation_checkpointing=full"))
    assert made.tokens_per_second(own) == pytest.approx(1e6)
    assert made.hours(own) == pytest.approx(made.tokens / 1e6 / 3600)
    # Other ways are as much faster or slower as they are planned to be.
    other = made.table[0]
    assert own.speed is not None and other.speed is not None
    ratio = other.speed.tokens_per_second / own.speed.tokens_per_second
    assert made.tokens_per_second(other) == pytest.approx(ratio * 1e6) and ratio > 1.1
    # Without a roofline, all rows have what was measured.
    unknown = make_plan(given, parse_machines("8xFoo", memory_gib=40), measured_tokens_per_second=1e6)
    assert {unknown.tokens_per_second(option) for option in unknown.table} == {1e6}


def test_a_strategy_that_was_asked_for_is_not_replaced_without_a_word() -> None:
    for strategy, words in (("zero3", "zero3 fits too, about as fast"), ("ddp", "ddp does not fit"), ("auto", None)):
        preset = "8b" if strategy == "ddp" else "125m"
        made = planned(preset, "8xH100", parallel={"strategy": strategy, "workers": 8})
        assert made.recommendation.option is not None and made.recommendation.option.strategy != strategy
        assert (words is None) == ("The config's" not in made.recommendation.reason)
        assert words is None or f"The config's parallel.strategy={words}." in made.recommendation.reason


def test_there_is_a_runner_up_and_room_is_told() -> None:
    made = small()
    chosen, second = made.recommendation.option, made.recommendation.runner_up
    assert chosen is not None and second is not None and second.fits and second.way != chosen.way
    assert chosen.memory is not None and made.usable_bytes is not None
    assert made.headroom_bytes(chosen) == made.usable_bytes - chosen.memory.peak_bytes


def test_a_small_model_on_slow_networks_needs_no_shards() -> None:
    made = make_plan(config("117m"), parse_machines("16xA100", interconnect="ethernet-10"))
    assert made.recommendation.option is not None and made.recommendation.option.strategy == "ddp"


#: Llama 3's largest (Dubey et al. 2024, table 3), and its batch on 512 accelerators.
_LARGEST = {"dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn_dim": 53248, "preset": None}


@pytest.mark.slow
def test_the_largest_models_are_shared_by_matrices_or_layers() -> None:
    train = {"sequence_length": 8192, "global_batch": 256, "micro_batch": 1, "compile": True}
    made = planned("8b", "512xH100", model={**_LARGEST, "max_sequence_length": 8192}, train=train)
    chosen = made.recommendation.option
    assert chosen is not None and chosen.fits and chosen.layout is not None
    assert chosen.layout.mesh.tp * chosen.layout.mesh.pp > 1 and "train.compile=false" in chosen.overrides


def test_a_single_card_gets_moments_in_host_memory_or_in_8_bits() -> None:
    made = planned("3b", "1xL40S", train={"global_batch": 8, "sequence_length": 512})
    chosen = made.recommendation.option
    assert chosen is not None and chosen.more == ("optimizer.offload=true",)
    assert "of host memory on every machine" in made.recommendation.reason
    # Moments in 8 bits change what is computed, so they come last.
    here = planned("3b", "1xL40S", train={"global_batch": 8, "sequence_length": 512}, optimizer={"offload": True})
    assert here.recommendation.option is not None and here.recommendation.option.more == ()


def test_long_rows_are_shared() -> None:
    train = {"global_batch": 8, "sequence_length": 131072, "micro_batch": 1}
    made = planned("8b", "8xA100-40GB", model={"max_sequence_length": 131072}, train=train)
    assert made.recommendation.option is not None
    assert any(text.startswith("parallel.") for text in made.recommendation.option.more)


def test_all_workers_may_share_rows() -> None:
    made = planned("1b", "8xH100", parallel={"context": 8, "workers": 8})
    assert made.recommendation.option is not None and made.recommendation.option.layout is not None
    assert made.recommendation.option.layout.mesh.cp == 8


def test_cards_without_bf16_are_told() -> None:
    [note] = planned("125m", "8xT4").notes
    assert "Tesla T4 has no products in bf16" in note and "train.precision=fp16" in note
    assert planned("125m", "8xT4", train={"precision": "fp16"}).notes == ()


def test_strategies_that_the_config_forbids_have_their_reason() -> None:
    made = planned("125m", "2xH100")
    reasons = {option.strategy: option.refusal for option in made.table}
    assert reasons["hsdp"] is not None and "two levels" in reasons["hsdp"].what
    assert reasons["ddp"] is None


def test_a_config_that_no_strategy_can_train_is_refused_as_train_refuses_it() -> None:
    with pytest.raises(ConfigError) as refused:
        planned("125m", "3xH100")
    assert "512 rows cannot be shared evenly by 3 workers" in refused.value.render()


def test_degrees_of_the_config_are_kept() -> None:
    made = planned("8b", "8xH100", parallel={"tensor": 8, "workers": 8})
    assert {option.strategy for option in made.table} == {"single"}
    assert made.table[0].layout is not None and made.table[0].layout.mesh.tp == 8


def test_what_to_type() -> None:
    one, eight = small(), planned("8b", "64xH100")
    assert one.recommendation.option is not None and eight.recommendation.option is not None
    typed = command("run.yaml", [], one.machines, one.recommendation.option)
    assert typed.startswith("headway train run.yaml parallel.strategy=ddp") and typed.endswith(" --workers 8")
    # Of the user's own overrides, only those stay out that the plan answers.
    own = ["model.preset=8b", "name=two words", "parallel.workers=2", "parallel.strategy=zero1"]
    typed = command("run.yaml", own, eight.machines, eight.recommendation.option)
    assert typed.startswith("torchrun --nnodes 8 --nproc-per-node 8 ")
    assert "-m headway train run.yaml model.preset=8b 'name=two words' parallel.strategy=" in typed
    assert "zero1" not in typed and "parallel.workers" not in typed


def test_copies_are_one_per_machine() -> None:
    made = planned("1b", "32xH100")
    hsdp = next(option for option in made.table if option.strategy == "hsdp")
    assert "parallel.replicate=4" in hsdp.overrides and hsdp.layout is not None
    assert hsdp.layout.mesh.dp_shard == 8


@pytest.mark.slow
def test_strategies_of_deepspeed_take_part_where_it_is_installed_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(made: Plan) -> set[str]:
        return {option.strategy for option in made.table} & set(DEEPSPEED)

    left_out = planned("125m", "8xH100")
    assert listed(left_out) == set() and left_out.deepspeed is None
    assert left_out.no_deepspeed is not None and "pip install" in left_out.no_deepspeed
    asked = planned("125m", "8xH100", parallel={"strategy": "deepspeed_zero2"})
    assert listed(asked) == set(DEEPSPEED) and asked.deepspeed == "parallel.strategy asks for one"
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    installed = planned("125m", "8xH100")
    assert listed(installed) == set(DEEPSPEED) and installed.deepspeed == "it is installed"
    assert installed.no_deepspeed is None
    # What is installed need not be installed: the config, or that nobody shares anything, is the reason then.
    refused, alone = planned("125m", "8xH100", train={"compile": True}), planned("125m", "1xH100")
    assert (
        refused.no_deepspeed == "a model under DeepSpeed is not compiled: its hooks would cut the graph at every layer"
    )
    assert alone.no_deepspeed == "a single data-parallel worker has nothing to divide"
    # Of ways about as fast another is simpler; but they can be chosen.
    assert installed.recommendation.option is not None and installed.recommendation.option.strategy == "ddp"
    theirs = [option for option in installed.table if option.strategy in DEEPSPEED]
    given = config("125m")
    chosen = Planner(given, given.model, installed.machines).recommend(theirs).option
    assert chosen is not None and chosen.strategy in DEEPSPEED and chosen.fits
    # Where nobody asked, those that do not go with the config are left out.
    made = planned("125m", "8xH100", train={"precision": "fp16"})
    assert listed(made) == set() and made.deepspeed is None


def test_8_bits_are_refused_where_there_are_none_and_unknown_where_nothing_is_known() -> None:
    eight: dict[str, Any] = {"train": {"precision": "fp8"}}
    made = planned("1b", "8xH100", **eight)
    assert made.recommendation.option is not None and made.recommendation.option.speed is not None
    unknown = make_plan(config("1b", **eight), parse_machines("8xFoo", memory_gib=80))
    assert unknown.table[0].memory is not None and unknown.table[0].speed is None
    for machines in (parse_machines("8xA100"), this_machine(1, accelerators=False)):
        with pytest.raises(ConfigError, match="does not support 8-bit products") as refused:
            make_plan(config("1b", **eight), machines)
        assert refused.value.fix.startswith("train.precision=bf16")
    with pytest.raises(ConfigError, match="do not fill the tiles"):
        planned("1b", "8xH100", train={"precision": "fp8", "sequence_length": 2040})


def test_experts_have_selective_checkpointing_too() -> None:
    model = {"preset": "16m-moe", "vocab_size": 8192}
    made = make_plan(resolve(Config.model_validate({"model": model, "train": {"steps": 1}})), parse_machines("8xH100"))
    peaks = {o.checkpointing: o.memory.peak_bytes for o in made.table if o.strategy == "ddp" and o.memory}
    assert peaks["full"] < peaks["selective"] < peaks["none"]


def test_experts_that_nobody_divides_are_told() -> None:
    model = {"dim": 64, "layers": 2, "heads": 4, "ffn_dim": 160, "vocab_size": 8192, "experts": 4}
    train = {"steps": 1, "global_batch": 16}

    def made(**parallel: int) -> Plan:
        given = resolve(Config.model_validate({"model": model, "train": train, "parallel": parallel}))
        return make_plan(given, parse_machines(f"{parallel['workers']}xH100"))

    copied, divided = made(tensor=2, workers=2), made(tensor=2, expert=2, workers=2)
    [note] = copied.notes
    assert "including zero3: parallel.expert=2" in note
    assert divided.notes == made(tensor=2, workers=4).notes == ()
    # `single` sums no gradients, so it is not what such a config is trained by.
    assert {option.strategy for option in copied.table} == {"ddp"} and copied.table[0].memory is not None
    assert {option.strategy for option in divided.table} == {"single"} and divided.table[0].memory is not None
    assert copied.table[0].memory.peak.weights > divided.table[0].memory.peak.weights


@pytest.mark.parametrize(("host_gib", "fits"), [(3.0, False), (37.0, False), (38.0, True), (None, True)])
def test_an_option_fits_only_if_its_host_memory_does(host_gib: float | None, fits: bool) -> None:
    """1.28 B parameters: 16 bytes each for the update, 12 for a save, and 4 GiB for the process; 37.5 GiB."""
    train = {"global_batch": 16, "micro_batch": 1, "activation_checkpointing": "full"}
    given = config("1b", train=train, optimizer={"offload": True}, model={"vocab_size": 151936})
    machines = parse_machines("1xRTX-4090", host_gib=host_gib)
    made = make_plan(given, machines)
    assert made.own.fits is fits and made.own.memory is not None
    parts = made.own.memory.host.parts
    total = made.counts.total
    assert made.host_bytes(made.own) == 28 * total + 4 * 2**30 == sum(parts.values())
    if host_gib == 3.0:
        assert made.recommendation.option is None
        assert re.search(r", and \S+ GiB of 3.0 GiB in the memory of a machine", made.recommendation.reason)


def test_an_update_in_host_memory_takes_the_time_that_was_measured() -> None:
    given = config("1b", train={"global_batch": 16, "micro_batch": 1}, optimizer={"offload": True})
    assumed = parse_machines("1xA100")
    measured = replace(assumed, host_bytes_per_second=20e9)
    slow, fast = (make_plan(given, machines) for machines in (measured, assumed))
    total = slow.counts.total
    assert slow.host_update_seconds(slow.own) == pytest.approx(40 * total / 20e9)
    assert fast.host_update_seconds(fast.own) == pytest.approx(40 * total / 100e9)
    assert slow.own.speed is not None and fast.own.speed is not None
    longer = slow.own.speed.step_seconds - fast.own.speed.step_seconds
    assert longer == pytest.approx(40 * total * (1 / 20e9 - 1 / 100e9))
    assert make_plan(config("1b"), assumed).host_update_seconds(slow.own) is not None


def test_the_disk_of_all_kept_checkpoints_is_counted() -> None:
    rules = {"keep": 2, "keep_best": 1, "keep_every": "100M tokens", "keep_for": "2 days", "every": "10 steps"}
    made = planned("125m", "8xH100", checkpoint=rules, evaluation={"every": "10 steps"})
    assert made.disk.checkpoint_bytes == 12 * made.counts.total
    assert made.disk.checkpoints == 2 + 1 + 10 + 1  # of 1 B tokens; and the one that is being written
    assert made.disk.uncounted == ("checkpoint.keep_for=48 h",) and made.disk.free_bytes is None

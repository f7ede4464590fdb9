"""Every way to split a model trains the same model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.trials import STEPS, Trials, close

DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3")
#: Every strategy once, with two workers or with four; then the other pairs.
WAYS = [(2, "ddp"), (2, "zero1"), (2, "zero2"), (4, "zero3")]
OTHER_WAYS = [(4, "ddp"), (4, "zero1"), (4, "zero2"), (2, "zero3")]


@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["most", "others"])
def test_all_strategies_learn_what_one_worker_does(trials: Callable[..., Trials], ways: list[tuple[int, str]]) -> None:
    """Where mistakes stay silent: rows with unequally many tokens, several micro-batches, clipping, a shared matrix."""
    runs = trials(data={"packing": "pad"}, model={"tie_embeddings": True}, train={"lanes": 4, "max_grad_norm": 0.3})
    runs.add("single", 1)
    measured = "telemetry.communication_every=2"
    names = [runs.add(f"{s}-{n}", n, f"parallel.strategy={s}", measured) for n, s in ways]
    names.append(runs.add("hsdp-4", 4, "parallel.strategy=hsdp"))
    names.append(runs.add("zero3-offload", 2, "parallel.strategy=zero3", "optimizer.offload=true"))
    each = "parallel.reduce_every=micro_batch"
    names.append(runs.add("zero3-each", 2, "parallel.strategy=zero3", each))
    if ways is OTHER_WAYS:
        names.append(runs.add("hsdp-each", 4, "parallel.strategy=hsdp", each))
        names.append(runs.add("offload-each", 2, "parallel.strategy=zero3", "optimizer.offload=true", each))
    runs.run()
    expected = runs.losses("single")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    assert len(set(runs.metric("single", "train/items"))) > 1
    norms = runs.metric("single", "train/grad_norm")
    assert min(norms) > 0.3
    for name in names:
        assert close(runs.losses(name), expected), name
        assert close(runs.metric(name, "train/grad_norm"), norms), name
        assert runs.metric(name, "evaluation/loss") == pytest.approx(runs.metric("single", "evaluation/loss"), abs=1e-5)
    for name in names[: len(ways)]:  # under every strategy something is exchanged in each step
        shares = runs.metric(name, "communication/exposed_share")
        assert len(shares) == STEPS // 2 and all(0 < share < 1 for share in shares), (name, shares)
        assert min(runs.metric(name, "communication/sent_gib")) > 0, name


@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHER_WAYS, marks=pytest.mark.slow)], ids=["most", "others"])
def test_elastic_runs_have_the_same_bits_under_every_strategy(
    trials: Callable[..., Trials], ways: list[tuple[int, str]]
) -> None:
    # Widths that do not fill vectors: kernels that treat the last elements of a shard otherwise would show.
    widths = {"dropout": 0.1, "dim": 36, "heads": 3, "kv_heads": 1, "ffn_dim": 75}
    runs = trials(determinism="elastic", model=widths, train={"steps": 5})
    names = [runs.add("single", 1)]
    names += [runs.add(f"{s}-{n}", n, f"parallel.strategy={s}") for n, s in ways]
    names.append(runs.add("hsdp-4", 4, "parallel.strategy=hsdp"))
    # What shards on a CPU comes down to one worker too, whatever the config says of where moments are.
    offloaded = (1, 2) if ways is OTHER_WAYS else (2,)
    names += [runs.add(f"offload-{n}", n, "parallel.strategy=zero3", "optimizer.offload=true") for n in offloaded]
    runs.run()
    hashes = {name: runs.hash(name) for name in names}
    assert len(set(hashes.values())) == 1, hashes


def test_gradients_reduced_in_every_micro_batch_repeat_their_bits(trials: Callable[..., Trials]) -> None:
    runs = trials(train={"steps": 4}, checkpoint={"every": "2 steps"})
    each = ("parallel.strategy=zero3", "parallel.reduce_every=micro_batch")
    runs.add("whole", 2, *each)
    runs.add("once", 2, each[0], "parallel.reduce_every=step")
    runs.run()
    runs.add("resumed", 2, *each, copy_of="whole")
    runs.run()
    assert runs.hash("resumed") == runs.hash("whole")
    # Otherwise nothing would have been reduced in between.
    assert runs.hash("once") != runs.hash("whole")


def resumed_pairs(runs: Trials, strategies: tuple[str, ...], apart: tuple[int, ...]) -> list[str]:
    """Save under every strategy and alone, go on under the one so many places later in that circle; returns the names
    of the runs that did."""
    runs.add("single", 1)
    for strategy in strategies:
        runs.add(strategy, 2, f"parallel.strategy={strategy}")
    runs.run()
    circle = ("single", *strategies)
    pairs = [(a, circle[(place + by) % len(circle)]) for place, a in enumerate(circle) for by in apart]
    names = [runs.add(f"{a}-{b}", 1 if b == "single" else 2, f"parallel.strategy={b}", copy_of=a) for a, b in pairs]
    runs.run()
    return names


@pytest.mark.slow
@pytest.mark.parametrize("apart", [(1,), pytest.param((2, 3, 4), marks=pytest.mark.slow)])
def test_a_run_goes_on_under_any_other_strategy(trials: Callable[..., Trials], apart: tuple[int, ...]) -> None:
    runs = trials()
    names = resumed_pairs(runs, DATA_PARALLEL, apart)
    expected = runs.losses("single")
    assert not [(name, runs.losses(name), expected) for name in names if not close(runs.losses(name), expected)]


@pytest.mark.slow
def test_muon_goes_on_under_any_other_strategy_with_the_same_bits(trials: Callable[..., Trials]) -> None:
    """It rounds to bf16 on its way, which blows up the last bits of a gradient: only bits can be compared."""
    runs = trials(optimizer={"name": "muon"}, determinism="elastic")
    names = resumed_pairs(runs, ("ddp", "zero1", "zero2"), (1, 2, 3))
    assert {runs.hash(name) for name in names} == {runs.hash("single")}


#: Six experts of odd widths, so that shards of their matrices end anywhere; a bias that moves fast.
EXPERTS = {
    "experts": 6,
    "experts_per_token": 2,
    "shared_experts": 1,
    "dense_layers": 1,
    "expert_ffn_dim": 21,
    "router_score": "sigmoid",
    "balance_bias_rate": 0.01,
    "balance_loss": 0.01,
}


@pytest.mark.slow
def test_experts_learn_under_every_strategy_what_they_do_on_one_worker(trials: Callable[..., Trials]) -> None:
    runs = trials(model=EXPERTS)
    runs.add("single", 1)
    names = [runs.add(s, 2, f"parallel.strategy={s}") for s in DATA_PARALLEL]
    runs.run()
    expected = runs.losses("single")
    assert expected[-1] < expected[0] - 0.5
    assert not [(name, runs.losses(name), expected) for name in names if not close(runs.losses(name), expected)]


@pytest.mark.slow
def test_experts_and_their_biases_have_the_same_bits_under_every_strategy(trials: Callable[..., Trials]) -> None:
    runs = trials(determinism="elastic", model={**EXPERTS, "dropout": 0.1}, train={"activation_checkpointing": "full"})
    runs.add("single", 1)
    names = [runs.add(f"{s}-2", 2, f"parallel.strategy={s}") for s in ("ddp", "zero1", "zero3")]
    names.append(runs.add("zero3-4", 4, "parallel.strategy=zero3"))
    runs.run()
    names += [runs.add("resumed", 2, copy_of="single"), runs.add("alone", 1, copy_of="zero3-2")]
    names.append(runs.add("stored", 1, "train.activation_checkpointing=none"))
    runs.run()
    assert {name: runs.hash(name) for name in names} == dict.fromkeys(names, runs.hash("single"))

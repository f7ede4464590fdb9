"""Workers that share matrices (tensor parallelism) or rows (context parallelism) train the same model as one alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.store import CheckpointStore
from support.runs import headway, run_workers
from support.trials import Trials, close

TENSOR, CONTEXT = "parallel.tensor=2", "parallel.context=2"
#: Where mistakes stay silent: rows with unequally many targets, a shared matrix, clipping in every step.
HARD: dict[str, Any] = {
    "data": {"packing": "pad"},
    "model": {"tie_embeddings": True, "dropout": 0.0},
    "train": {"steps": 12, "micro_batch": 1, "lanes": 4, "max_grad_norm": 0.3},
}


def strategy(name: str) -> str:
    return f"parallel.strategy={name}"


def assert_like_single(runs: Trials, names: list[str]) -> None:
    """Losses, norms that gradients are clipped by, items and evaluations."""
    for metric in ("train/loss", "train/grad_norm", "train/items", "evaluation/loss"):
        expected = runs.metric("single", metric)
        assert expected
        for name in names:
            found = runs.metric(name, metric)
            # Norms answer to small differences of the weights more than losses do.
            same = close(found, expected) if metric != "train/grad_norm" else found == pytest.approx(expected, rel=1e-4)
            assert same, (name, metric, found, expected)


def test_parts_gradients_and_norms_are_those_of_the_whole() -> None:
    run_workers(4, Path(__file__).with_name("split_worker.py"))


@pytest.mark.slow
def test_two_workers_that_share_all_they_can(trials: Callable[..., Trials]) -> None:
    runs = trials(**HARD)
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR), runs.add("cp", 2, CONTEXT)]
    names += [runs.add(f"cp-{s}", 2, CONTEXT, strategy(s)) for s in ("zero1", "zero2", "zero3")]
    runs.run()
    losses = runs.losses("single")
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    assert min(runs.metric("single", "train/grad_norm")) > 0.3
    assert len(set(runs.metric("single", "train/items"))) > 1
    assert_like_single(runs, names)


@pytest.mark.slow
def test_matrices_and_rows_shared_beside_every_strategy(trials: Callable[..., Trials]) -> None:
    runs = trials(**HARD)
    runs.add("single", 1)
    names = [runs.add(f"tp-{s}", 4, TENSOR, strategy(s)) for s in ("ddp", "zero1", "zero2", "zero3")]
    names += [runs.add(f"cp-{s}", 4, CONTEXT, strategy(s)) for s in ("ddp", "zero1", "zero2", "zero3")]
    names += [runs.add("tp-cp", 4, TENSOR, CONTEXT), runs.add("tp-cp-zero3", 4, TENSOR, CONTEXT, strategy("zero3"))]
    runs.run()
    assert_like_single(runs, names)


@pytest.mark.slow
def test_documents_that_know_nothing_of_each_other(trials: Callable[..., Trials]) -> None:
    """With a window, layers computed again in the backward pass, and norms per head."""
    model = {"sliding_window": 12, "qk_norm": True, "dropout": 0.0}
    train = {**HARD["train"], "activation_checkpointing": "full"}
    runs = trials(data={"document_mask": True, "packing": "best_fit"}, model=model, train=train)
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR), runs.add("cp", 2, CONTEXT)]
    runs.run()
    assert_like_single(runs, names)


@pytest.mark.slow
def test_bf16_is_as_near_as_its_rounding(trials: Callable[..., Trials]) -> None:
    runs = trials(train={**HARD["train"], "precision": "bf16"})
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR), runs.add("cp", 2, CONTEXT), runs.add("cp-zero3", 2, CONTEXT, strategy("zero3"))]
    runs.run()
    for name in names:
        far = [abs(a - b) for a, b in zip(runs.losses(name), runs.losses("single"), strict=True)]
        assert 0 < max(far) < 0.02, (name, far)


@pytest.mark.slow
def test_a_run_goes_on_however_it_is_shared(trials: Callable[..., Trials]) -> None:
    runs = trials()
    layouts = {"single": (1, ()), "tp": (2, (TENSOR,)), "cp": (2, (CONTEXT,)), "zero3": (2, (strategy("zero3"),))}
    for name, (workers, overrides) in layouts.items():
        runs.add(name, workers, *overrides)
    runs.run()
    pairs = [("tp", "single"), ("single", "cp"), ("cp", "zero3"), ("zero3", "tp"), ("tp", "cp")]
    names = [runs.add(f"{a}-{b}", layouts[b][0], *layouts[b][1], copy_of=a) for a, b in pairs]
    runs.run()
    assert_like_single(runs, names)
    evaluated = headway("eval", runs.folder / "runs" / "tp", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    # What was saved is the whole state, in the layout of one worker.
    saved = {name: _weights(runs.folder / "runs" / name) for name in ("single", "tp", "tp-cp")}
    for name in ("tp", "tp-cp"):
        assert saved[name].keys() == saved["single"].keys()
        assert all((saved[name][key] - value).abs().max() < 2e-3 for key, value in saved["single"].items())


@pytest.mark.slow
def test_a_run_of_shards_of_parts_goes_on_alone(trials: Callable[..., Trials]) -> None:
    runs = trials()
    runs.add("single", 1)
    both = (TENSOR, strategy("zero3"))
    runs.add("tp-zero3", 4, *both)
    runs.run()
    names = [runs.add("alone", 1, copy_of="tp-zero3"), runs.add("cut", 4, *both, copy_of="single")]
    runs.run()
    assert_like_single(runs, names)


@pytest.mark.slow
def test_another_arrangement_of_as_many_workers_is_told(tiny: Callable[..., Path]) -> None:
    """Each of these trains as one worker would, but not with the bits of the other."""
    config = tiny(model={"dropout": 0.0}, train={"steps": 10})
    assert headway("train", config, "-w", "2", TENSOR, faults="stop@step=3").returncode == 75
    again = headway("train", config, "-w", "2", TENSOR, faults="stop@step=6")
    assert again.returncode == 75 and "not bit for bit" not in again.stderr
    result = headway("train", config, "-w", "2", CONTEXT)
    assert result.returncode == 0 and "cp 2 instead of tp 2: the run continues, but not bit for bit" in result.stderr


def _weights(run: Path) -> dict[str, Any]:
    store = CheckpointStore(run / "checkpoints")
    info = store.newest(lambda text: None)
    assert info is not None
    return {name: tensor.float() for name, tensor in store.load(info).items()}


def test_what_cannot_be_shared_is_refused_before_the_first_step(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(model={"dropout": 0.0})
    for overrides, fix in (
        (["parallel.tensor=2", "model.kv_heads=1"], "parallel.tensor=1"),
        (["parallel.tensor=2", "model.ffn_dim=75"], "parallel.tensor=1"),
        (["parallel.tensor=2", "model.vocab_size=301"], "model.vocab_size=320"),
        (["parallel.tensor=2", "parallel.compression=powersgd", "determinism=off"], "parallel.compression=none"),
        (
            ["parallel.tensor=2", "train.compile=true", "train.activation_checkpointing=full"],
            "train.activation_checkpointing=selective",
        ),
        (["parallel.tensor=2", "train.compile=true", "parallel.strategy=zero3"], "parallel.strategy=zero2"),
        (["parallel.context=2", "train.sequence_length=30"], "a length of 32"),
        (["parallel.context=2", "data.mixture.stages=[{start: 0, sequence_length: 2}]"], "a length of 4"),
        (["parallel.context=2", "parallel.strategy=single"], "parallel.strategy=auto"),
    ):
        result = headway("train", config, "-w", "2", *overrides)
        assert result.returncode == 2 and fix in result.stderr, (overrides, result.stderr)
    assert not (tmp_path / "runs").exists()

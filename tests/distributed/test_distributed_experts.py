"""Experts on several workers learn what they do on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.models.build import build_model
from headway.models.huggingface.checkpoint import import_model
from support.runs import headway, run_workers
from support.trials import Trials, close

EXPERTS = {
    "experts": 4,
    "experts_per_token": 2,
    "shared_experts": 1,
    "dense_layers": 1,
    "expert_ffn_dim": 21,
    "router_score": "sigmoid",
    "balance_bias_rate": 0.01,
    "balance_loss": 0.1,
    "dropout": 0.0,
    "init_std": 0.06,  # scores that differ: two that are equal but for rounding may send a token here or there
}
#: Rows with unequally many targets, and clipping in every step.
HARD: dict[str, Any] = {
    "data": {"packing": "pad"},
    "model": EXPERTS,
    "train": {"steps": 12, "micro_batch": 1, "lanes": 4, "max_grad_norm": 0.3},
}
METRICS = (
    "train/loss",
    "train/items",
    "evaluation/loss",
    "train/router_z_loss",
    "train/router_balance_loss",
    "train/expert_load_max",
    "train/dropped_share",
)


def expert(degree: int, strategy: str = "auto") -> tuple[str, str]:
    return f"parallel.expert={degree}", f"parallel.strategy={strategy}"


def assert_like_single(runs: Trials, names: list[str]) -> None:
    norms = runs.metric("single", "train/grad_norm")
    assert min(norms) > 0.3, "clipping in every step"
    for name in names:
        assert runs.metric(name, "train/grad_norm") == pytest.approx(norms, rel=1e-4), name
        for metric in METRICS:
            found, expected = runs.metric(name, metric), runs.metric("single", metric)
            assert expected and close(found, expected), (name, metric, found, expected)


def expert_worker(which: str) -> None:
    run_workers(4, Path(__file__).with_name("experts_worker.py"), which)


@pytest.mark.slow
def test_parts_gradients_norms_and_counts_are_those_of_the_whole() -> None:
    expert_worker("some")


@pytest.mark.slow
def test_they_are_under_every_strategy_and_on_every_mesh() -> None:
    expert_worker("all")


@pytest.mark.slow
def test_experts_on_two_workers_and_there_and_back(trials: Callable[..., Trials]) -> None:
    """Saved where experts are dealt out and taken up where they are not, the other way round, and bit for bit."""
    runs = trials(**HARD, checkpoint={"every": "3 steps"})
    runs.add("single", 1, "train.steps=6")
    names = [runs.add(s, 2, *expert(2, s), "train.steps=6") for s in ("ddp", "zero3")]
    names.append(runs.add("dealt-out", 2, *expert(2, "zero1"), "train.steps=6", copy_of="single"))
    names.append(runs.add("together", 2, *expert(1, "zero2"), "train.steps=6", copy_of="zero3"))
    names.append(runs.add("again", 2, *expert(2, "ddp"), "train.steps=6", copy_of="ddp"))
    runs.run()
    assert len(set(runs.metric("single", "train/items"))) > 1
    assert_like_single(runs, names)
    assert runs.hash("again") == runs.hash("ddp")


@pytest.mark.slow
def test_two_workers_share_experts_beside_whatever_else_they_share(trials: Callable[..., Trials]) -> None:
    runs = trials(**HARD)
    runs.add("single", 1)
    names = [runs.add("pp", 2, "parallel.pipeline=2"), runs.add("tp", 2, "parallel.tensor=2")]
    names.append(runs.add("tp-expert", 2, "parallel.tensor=2", *expert(2), "train.activation_checkpointing=full"))
    names.append(runs.add("cp", 2, "parallel.context=2", *expert(2), "train.activation_checkpointing=selective"))
    runs.run()
    assert_like_single(runs, names)


@pytest.mark.slow
def test_a_run_goes_on_with_experts_on_any_number_of_workers(trials: Callable[..., Trials], tmp_path: Path) -> None:
    runs = trials(**HARD)
    runs.add("single", 1)
    runs.add("two", 2, *expert(2, "zero3"))
    for degree in (2, 4):
        runs.add(f"four-{degree}", 4, *expert(degree, "zero2"))
    runs.run()
    names = ["two", "four-2", "four-4", runs.add("four-4-alone", 1, copy_of="four-4")]
    names += [runs.add(f"{a}-two", 2, *expert(2, "zero2"), copy_of=a) for a in ("four-2", "four-4")]
    names += [runs.add(f"{a}-four", 4, *expert(4, "zero3"), copy_of=a) for a in ("single", "two", "four-2")]
    names.append(runs.add("hsdp", 4, *expert(2, "hsdp"), copy_of="four-4"))
    runs.run()
    assert_like_single(runs, names)
    exported = {name: logits_of_export(runs.folder / "runs" / name, tmp_path / name) for name in ("single", "four-4")}
    torch.testing.assert_close(exported["four-4"], exported["single"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pipeline_stages_share_the_experts_they_have(trials: Callable[..., Trials]) -> None:
    """The first stage has none, or as many as the second."""
    runs = trials(**HARD)
    stages = "parallel.pipeline=2"
    runs.add("single", 1)
    names = [runs.add(s, 4, stages, *expert(2, s)) for s in ("ddp", "zero2", "zero3")]
    runs.run()
    assert_like_single(runs, names)
    runs.add("all", 1, "model.dense_layers=0")
    runs.add("cut", 4, "model.dense_layers=0", stages, *expert(2))
    runs.run()
    assert close(runs.losses("cut"), runs.losses("all"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_as_near_as_its_rounding(trials: Callable[..., Trials], precision: str) -> None:
    runs = trials(**{**HARD, "train": {**HARD["train"], "precision": precision}})
    runs.add("single", 1)
    names = [runs.add("two", 2, *expert(2)), runs.add("tp", 2, "parallel.tensor=2", *expert(2))]
    runs.run()
    assert not any(runs.metric("single", "train/skipped_steps"))
    for name in names:
        far = [abs(a - b) for a, b in zip(runs.losses(name), runs.losses("single"), strict=True)]
        assert 0 < max(far) < 0.02, (name, far)


def logits_of_export(run: Path, folder: Path) -> torch.Tensor:
    assert headway("export", run, folder).returncode == 0
    config, state = import_model(folder)
    model = build_model(config, vocab_size=1, seed=0, initialize=False).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(0)))  # type: ignore[no-any-return]

"""Workers that share matrices (tensor parallelism) or rows (context parallelism) train the same model as one alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support_trials import STEPS, Trials, close

TENSOR, CONTEXT = "parallel.tensor=2", "parallel.context=2"


def assert_like_single(runs: Trials, names: list[str]) -> None:
    """Losses, the losses of evaluations, and the norms that gradients are clipped by."""
    for metric in ("train/loss", "evaluation/loss", "train/grad_norm", "train/items"):
        expected = runs.metric("single", metric)
        found = {name: runs.metric(name, metric) for name in names}
        assert not [(name, metric, series, expected) for name, series in found.items() if not close(series, expected)]


def strategy(name: str) -> str:
    return f"parallel.strategy={name}"


def test_matrices_and_rows_shared_beside_every_strategy(trials: Callable[..., Trials]) -> None:
    runs = trials()
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR), runs.add("cp", 2, CONTEXT)]
    names += [runs.add(f"cp-{s}-2", 2, CONTEXT, strategy(s)) for s in ("zero1", "zero2", "zero3")]
    for split in (TENSOR, CONTEXT):
        names += [runs.add(f"{split[9]}-{s}", 4, split, strategy(s)) for s in ("ddp", "zero1", "zero2", "zero3")]
    names += [runs.add("tp-cp", 4, TENSOR, CONTEXT), runs.add("tp-cp-zero3", 4, TENSOR, CONTEXT, strategy("zero3"))]
    runs.run()
    assert len(runs.losses("single")) == STEPS and runs.losses("single")[-1] < runs.losses("single")[0] - 0.5
    assert max(runs.metric("single", "train/grad_norm")) > 1.0, "nothing was clipped"
    assert_like_single(runs, names)

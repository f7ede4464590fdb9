"""Pipeline stages whose matrices, rows or both are shared by workers train the same model as one worker alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.telemetry.metrics import read_metrics
from support.runs import headway
from support.trials import Trials, close

STAGES, TENSOR, CONTEXT = "parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2"
GPIPE, INTERLEAVED = "parallel.pipeline_schedule=gpipe", "parallel.pipeline_schedule=interleaved"
ZERO1, ZERO2, ZERO3, HSDP = (f"parallel.strategy={name}" for name in ("zero1", "zero2", "zero3", "hsdp"))
#: Where mistakes stay silent: rows with unequally many targets, a shared matrix, clipping in every step.
HARD: dict[str, Any] = {
    "data": {"packing": "pad"},
    "model": {"layers": 4, "tie_embeddings": True, "dropout": 0.0},
    "train": {"steps": 6, "micro_batch": 2, "lanes": 2, "max_grad_norm": 0.3},
    "checkpoint": {"every": "3 steps"},
}


def assert_like_single(runs: Trials, names: list[str]) -> None:
    """Losses, norms that gradients are clipped by, items and evaluations."""
    assert min(runs.metric("single", "train/grad_norm")) > 0.3
    for metric in ("train/loss", "train/grad_norm", "train/items", "evaluation/loss"):
        expected = runs.metric("single", metric)
        assert expected
        for name in names:
            found = runs.metric(name, metric)
            assert close(found, expected), (name, metric, found, expected)


def first_step(runs: Trials, name: str) -> int:
    """Of the last attempt."""
    spans = read_metrics(runs.folder / "runs" / name).spans
    return spans[max(spans)].first_step


@pytest.mark.slow
def test_stages_of_parts_and_of_positions(trials: Callable[..., Trials]) -> None:
    runs = trials(**HARD)
    runs.add("single", 1)
    tensor, context = (STAGES, TENSOR), (STAGES, CONTEXT, INTERLEAVED, ZERO1)
    names = [runs.add("pp-tp", 4, *tensor), runs.add("pp-cp", 4, *context)]
    # Saved under one mesh and gone on with under another.
    names += [runs.add("single-pp-tp", 4, *tensor, copy_of="single")]
    names += [runs.add("pp-tp-pp-cp", 4, *context, copy_of="pp-tp")]
    runs.run()
    losses = runs.losses("single")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5
    assert len(set(runs.metric("single", "train/items"))) > 1
    assert_like_single(runs, names)
    assert [first_step(runs, name) for name in names] == [1, 1, 4, 4]


@pytest.mark.slow
def test_every_schedule_and_what_else_may_be_on(trials: Callable[..., Trials]) -> None:
    model = {"layers": 4, "qk_norm": True, "sliding_window": 12, "dropout": 0.0}
    stages = [{"start": "2 steps", "sequence_length": 16}]
    data = {"document_mask": True, "packing": "best_fit", "mixture": {"stages": stages}}
    runs = trials(data=data, model=model, train={**HARD["train"], "steps": 4})
    runs.add("single", 1)
    names = [runs.add("tp-gpipe", 4, STAGES, TENSOR, GPIPE), runs.add("tp-int", 4, STAGES, TENSOR, INTERLEAVED)]
    names += [runs.add("tp-again", 4, STAGES, TENSOR, "train.activation_checkpointing=full")]
    names += [runs.add("cp-gpipe", 4, STAGES, CONTEXT, GPIPE), runs.add("cp", 4, STAGES, CONTEXT, ZERO2)]
    names += [runs.add("cp-zero3", 4, STAGES, CONTEXT, INTERLEAVED, ZERO3)]
    runs.run()
    assert_like_single(runs, names)


@pytest.mark.slow
def test_all_dimensions_at_once(trials: Callable[..., Trials]) -> None:
    runs = trials(**{**HARD, "train": {**HARD["train"], "steps": 4}, "checkpoint": {"every": "2 steps"}})
    ways: dict[str, tuple[Any, ...]] = {
        "single": (1,),
        "pp-tp-cp": (8, STAGES, TENSOR, CONTEXT),
        "pp-tp-cp-zero3": (8, STAGES, TENSOR, CONTEXT, ZERO3, INTERLEAVED),
        "pp-tp-zero1": (8, STAGES, TENSOR, ZERO1),
        "pp-tp-zero2": (8, STAGES, TENSOR, ZERO2),
        "pp-hsdp": (8, STAGES, HSDP, "train.lanes=4", "train.micro_batch=1"),
    }
    for name, way in ways.items():
        runs.add(name, *way)
    runs.run()
    pairs = [("pp-tp-cp", "single"), ("single", "pp-tp-cp"), ("pp-tp-zero1", "pp-tp-cp-zero3")]
    resumed = [runs.add(f"{a}--{b}", *ways[b], copy_of=a) for a, b in pairs]
    runs.run()
    assert_like_single(runs, [*ways, *resumed])
    evaluated = headway("eval", runs.folder / "runs" / "pp-tp-cp", "--json")
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
def test_compiled_parts_of_matrices(trials: Callable[..., Trials]) -> None:
    runs = trials(**{**HARD, "model": {**HARD["model"], "layers": 2}})
    runs.add("single", 1)
    names = [runs.add("tp", 2, TENSOR, "train.compile=true")]
    runs.run()
    assert_like_single(runs, names)

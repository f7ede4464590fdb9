"""A model that is cut into pipeline stages is trained as if it were whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import headway, manifest, run_workers, state_hash
from support.trials import STEPS, Trials, close

LAYERS = {"dropout": 0.0, "layers": 4}
#: With a shared matrix larger updates blow up the last bits.
SLOW = {"learning_rate": 3e-3}
GPIPE, INTERLEAVED = "parallel.pipeline_schedule=gpipe", "parallel.pipeline_schedule=interleaved"
TWO, FOUR = "parallel.pipeline=2", "parallel.pipeline=4"


def relatively_close(a: list[float], b: list[float]) -> bool:
    """Gradient norms may be much larger than losses."""
    scale = max(1.0, *map(abs, b))
    return close([value / scale for value in a], [value / scale for value in b])


def different(runs: Trials, names: list[str], expected: str = "single") -> list[str]:
    """Runs whose losses, while training and at the end, gradient norms or items are not the expected ones."""
    metrics = ("train/loss", "train/grad_norm", "evaluation/loss", "train/items")
    return [
        f"{name} {metric}: {runs.metric(name, metric)} instead of {runs.metric(expected, metric)}"
        for name in names
        for metric in metrics
        if not relatively_close(runs.metric(name, metric), runs.metric(expected, metric))
    ]


@pytest.mark.slow
def test_every_schedule_learns_what_one_worker_does(trials: Callable[..., Trials]) -> None:
    # Three micro-batches in a lane: of an odd number the last one must not be lost.
    runs = trials(model=LAYERS, train={"global_batch": 12})
    runs.add("single", 1)
    names = [runs.add("gpipe", 2, TWO, GPIPE), runs.add("1f1b", 2, TWO)]
    names.append(runs.add("split", 2, TWO, "parallel.pipeline_split=[1, 3]"))
    names.append(runs.add("recomputed", 2, TWO, "train.activation_checkpointing=full"))
    for name, way in {"single-bf16": (1,), "bf16": (2, TWO)}.items():
        runs.add(name, *way, "train.precision=bf16")  # type: ignore[arg-type]
    runs.run()
    # Rounding to bf16 blows up the last bits of a sum; a backward pass under autocast would be further off.
    pairs = zip(runs.losses("bf16"), runs.losses("single-bf16"), strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs), runs.losses("bf16")
    expected = runs.losses("single")
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    # Otherwise a norm that leaves out a stage would not show in the update.
    assert all(norm > 1.0 for norm in runs.metric("single", "train/grad_norm"))
    assert not different(runs, names)


@pytest.mark.slow
def test_several_stages_per_worker_and_micro_batches_of_uneven_weight(trials: Callable[..., Trials]) -> None:
    runs = trials(model=LAYERS, train={"lanes": 2})
    packing = ("data.packing=pad", "data.document_mask=true")
    for workers, cut in ((1, ()), (2, (TWO, INTERLEAVED))):
        kind = "single" if workers == 1 else "interleaved"
        runs.add(kind, workers, *cut)
        runs.add(f"{kind}-packed", workers, *cut, *packing)
        runs.add(f"{kind}-shorter", workers, *cut, "data.mixture.stages=[{start: 6 steps, sequence_length: 16}]")
        runs.add(f"{kind}-ramp", workers, *cut, "train.batch_ramp=[{global_batch: 4, until: 3 steps}]")
    runs.add("1f1b-packed", 2, TWO, *packing)
    runs.run()
    assert not different(runs, ["interleaved-shorter"], "single-shorter")
    assert not different(runs, ["interleaved-ramp"], "single-ramp")
    assert runs.metric("interleaved-ramp", "train/items")[2:4] == [128, 256]
    assert not different(runs, ["interleaved"])
    assert not different(runs, ["interleaved-packed", "1f1b-packed"], "single-packed")
    # Rows hold different numbers of targets.
    assert len(set(runs.metric("single-packed", "train/items"))) > 1


@pytest.mark.slow
def test_stages_times_workers_that_share_the_data(trials: Callable[..., Trials]) -> None:
    runs = trials(model=LAYERS, train={"lanes": 2})
    runs.add("single", 1)
    names = [runs.add("pp4", 4, FOUR), runs.add("gpipe-zero3", 4, TWO, GPIPE, "parallel.strategy=zero3")]
    names += [runs.add(s, 4, TWO, INTERLEAVED, f"parallel.strategy={s}") for s in ("ddp", "zero1", "zero2", "zero3")]
    names.append(runs.add("each", 4, TWO, INTERLEAVED, "parallel.strategy=zero3", "parallel.reduce_every=micro_batch"))
    runs.run()
    assert not different(runs, names)


@pytest.mark.slow
def test_tied_embeddings(trials: Callable[..., Trials]) -> None:
    runs = trials(model={**LAYERS, "tie_embeddings": True}, train={"lanes": 2}, optimizer=SLOW)
    runs.add("single", 1)
    names = [runs.add("pp4", 4, FOUR)]
    names += [runs.add(s, 4, TWO, f"parallel.strategy={s}") for s in ("ddp", "zero1", "zero2", "zero3")]
    runs.run()
    assert not different(runs, names)


@pytest.mark.slow
def test_a_run_goes_on_with_other_stages(trials: Callable[..., Trials]) -> None:
    runs = trials(model={**LAYERS, "tie_embeddings": True}, train={"lanes": 2}, optimizer=SLOW)
    ways = {"single": (1,), "ddp": (2,), "pp": (2, TWO), "interleaved": (2, TWO, INTERLEAVED)}
    for name, way in ways.items():
        runs.add(name, *way)  # type: ignore[arg-type]
    runs.run()
    pairs = [("single", "pp"), ("pp", "single"), ("ddp", "interleaved"), ("interleaved", "ddp"), ("interleaved", "pp")]
    names = [runs.add(f"{a}-{b}", *ways[b], copy_of=a) for a, b in pairs]  # type: ignore[arg-type]
    runs.run()
    assert not [(name, runs.losses(name)) for name in names if not close(runs.losses(name), runs.losses("single"))]


@pytest.mark.slow
def test_both_copies_of_a_tied_matrix_stay_the_same_bits(trials: Callable[..., Trials]) -> None:
    runs = trials(model={"dropout": 0.1, "layers": 4, "tie_embeddings": True}, train={"lanes": 2})
    run_workers(4, Path(__file__).with_name("pipeline_worker.py"), runs.config)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """With dropout: every stage draws from a stream of its own, a function of the step alone."""
    config = tiny(parallel={"threads": 1, "pipeline": 2})
    straight = headway("train", config, "name=straight", "-w", "2")
    assert straight.returncode == 0, straight.stderr
    assert headway("train", config, "name=killed", "-w", "2", faults="kill@step=5").returncode != 0
    resumed = headway("train", config, "name=killed", "-w", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert state_hash(tmp_path / "runs" / "killed") == state_hash(tmp_path / "runs" / "straight")
    assert json.loads((tmp_path / "runs" / "straight" / "run.json").read_text())["model"]["parameters"] == sum(
        math.prod(entry["shape"])
        for name, entry in manifest(tmp_path / "runs" / "straight")["tensors"].items()
        if name.startswith("model.")
    )
    # The same weights in another arrangement are another order of sums, and that is said.
    other = headway(
        "train", config, "name=killed", "train.steps=12", "parallel.pipeline=1", "-w", "2", "--accept-changes"
    )
    assert other.returncode == 0 and "arranged as" in other.stderr, other.stderr


def test_a_module_that_declares_no_cuts_is_refused(tmp_path: Path) -> None:
    run_workers(2, Path(__file__).with_name("uncut_worker.py"), tmp_path)
    assert not (tmp_path / "runs").exists()

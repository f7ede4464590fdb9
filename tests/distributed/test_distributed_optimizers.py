"""Every optimizer has the bits of one worker where its state is divided, and goes on from what others have saved."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.store import CheckpointStore
from headway.config import load_resolved
from support.projections import apart, distance, exact
from support.runs import manifest, run_workers, state_hash, write_config

STEPS = 4
DIVIDED = [
    ("lion", "zero1"),
    ("lion", "zero2"),
    ("lion", "zero3"),
    ("muon", "zero2"),
    ("muon", "zero3"),
    ("adafactor", "zero1"),
    ("adafactor", "zero2"),
    *([("adamw8bit", "zero2"), ("adamw8bit", "zero3")] if find_spec("torchao") else []),
]
RESUMED = [(o, s) for o, s in DIVIDED if (o, s) in (("muon", "zero3"), ("adamw8bit", "zero3"))]


def run(folder: Path, workers: int, jobs: list[dict[str, Any]]) -> None:
    path = folder / f"jobs-{workers}.json"
    path.write_text(json.dumps(jobs))
    run_workers(workers, Path(__file__).with_name("strategies_worker.py"), path)


def job(config: Path, name: str, optimizer: str, *overrides: str, copy_of: Path | None = None) -> dict[str, Any]:
    return {
        "config": str(config),
        "overrides": [f"name={name}", f"optimizer.name={optimizer}", *overrides],
        "copy_of": str(copy_of) if copy_of else None,
    }


@pytest.mark.slow
def test_divided_optimizers_have_the_bits_of_one_worker(corpus: Path, tmp_path: Path) -> None:
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    config = write_config(
        tmp_path,
        data=data,
        determinism="elastic",
        # Matrices of 8 bits: rows of 192 elements.
        model={"dim": 192, "layers": 1, "heads": 6, "kv_heads": 3, "ffn_dim": 64},
        train={"steps": STEPS, "micro_batch": 1, "lanes": 2, "global_batch": 4},
        checkpoint={"every": f"{STEPS // 2} steps"},
        evaluation={"rows": 2},
    )
    optimizers = sorted({optimizer for optimizer, _ in DIVIDED})
    runs = tmp_path / "runs"
    run(tmp_path, 1, [job(config, o, o) for o in optimizers])
    divided = [job(config, f"{o}-{s}", o, f"parallel.strategy={s}") for o, s in DIVIDED]
    # What one worker has saved goes on divided.
    divided += [job(config, f"{o}-to-{s}", o, f"parallel.strategy={s}", copy_of=runs / o) for o, s in RESUMED]
    run(tmp_path, 2, divided)
    # And what was divided goes on with one worker.
    run(tmp_path, 1, [job(config, f"{o}-from-{s}", o, copy_of=runs / f"{o}-{s}") for o, s in RESUMED])
    expected = {optimizer: state_hash(runs / optimizer) for optimizer in optimizers}
    assert len(set(expected.values())) == len(optimizers)
    names = [(o, f"{o}-{s}") for o, s in DIVIDED]
    names += [(o, f"{o}-{way}-{s}") for o, s in RESUMED for way in ("to", "from")]
    assert not [name for optimizer, name in names if state_hash(runs / name) != expected[optimizer]]


@pytest.mark.slow
def test_trials_leave_no_trace_under_any_strategy(corpus: Path, tmp_path: Path) -> None:
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    config = write_config(
        tmp_path,
        data=data,
        train={"steps": STEPS, "global_batch": 8, "micro_batch": 2},
        checkpoint={"every": f"{STEPS // 2} steps"},
        evaluation={"rows": 2},
    )
    runs, jobs = tmp_path / "runs", []
    ways = {"plain": "train.trial_step=false", "tried": "train.trial_step=true", "fitted": "train.micro_batch=auto"}
    strategies = ("ddp", "zero1", "zero2", "zero3")
    for strategy in strategies:
        for way, override in ways.items():
            jobs.append(job(config, f"{strategy}-{way}", "adamw", f"parallel.strategy={strategy}", override))
        # The memory of this machine takes all four rows of a lane at once.
        jobs.append(job(config, f"{strategy}-four", "adamw", f"parallel.strategy={strategy}", "train.micro_batch=4"))
    run(tmp_path, 2, jobs)
    for strategy in strategies:
        assert state_hash(runs / f"{strategy}-plain") == state_hash(runs / f"{strategy}-tried"), strategy
        assert state_hash(runs / f"{strategy}-four") == state_hash(runs / f"{strategy}-fitted"), strategy
        assert manifest(runs / f"{strategy}-fitted")["context"]["micro_batch"] == 4


@pytest.mark.slow
def test_adafactor_learns_on_shards_what_it_does_on_whole_matrices(corpus: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        data={"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]},
        # 3 key-value heads: the rows of a matrix are cut unevenly.
        model={"dim": 48, "layers": 1, "heads": 3, "kv_heads": 3, "ffn_dim": 96},
        train={"steps": STEPS, "global_batch": 4},
        optimizer={"learning_rate": 0.01},
        checkpoint={"every": f"{STEPS // 2} steps"},
    )
    whole, cut = (job(config, s, "adafactor", f"parallel.strategy={s}") for s in ("zero2", "zero3"))
    runs = tmp_path / "runs"
    ways = {"on": "zero3", "whole": "zero2"}
    goes_on = [
        job(config, name, "adafactor", f"parallel.strategy={s}", copy_of=runs / "zero3") for name, s in ways.items()
    ]
    run(tmp_path, 2, [whole, cut, *goes_on])
    expected = losses(runs / "zero2")
    assert expected[-1] < expected[0] - 0.03
    assert losses(runs / "zero3") == pytest.approx(expected, abs=1e-5)
    assert losses(runs / "whole")[-2:] == pytest.approx(expected[-2:], abs=1e-5)
    assert state_hash(runs / "on") == state_hash(runs / "zero3")


def losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["train/loss"] for record in records if "train/loss" in record]


#: Ways to divide matrices: number of workers, and overrides.
WAYS = {
    "alone": (1, ""),
    "zero1": (2, "parallel.strategy=zero1"),
    "zero3": (2, "parallel.strategy=zero3"),
    "tensor": (2, "parallel.tensor=2"),
}
MORE_WAYS = {
    "ddp": (2, "parallel.strategy=ddp"),
    "zero2": (2, "parallel.strategy=zero2"),
    "pipeline": (2, "parallel.pipeline=2"),
    "hsdp": (4, "parallel.strategy=hsdp"),
    "zero3-4": (4, "parallel.strategy=zero3"),
    "zero3-tensor": (4, "parallel.strategy=zero3 parallel.tensor=2"),
    "elastic": (2, "parallel.strategy=zero3 determinism=elastic"),
}


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.slow)], ids=["few", "more"])
def test_muon_updates_projections_apart_under_every_strategy(
    corpus: Path, tmp_path: Path, ways: dict[str, tuple[int, str]]
) -> None:
    """The first update is a function of the weights before it and of the moments after it, which are files."""
    config = write_config(
        tmp_path,
        data={"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]},
        # Queries have more rows than columns, and so steps of another size.
        model={"dim": 32, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 8, "ffn_dim": 48, "dropout": 0.0},
        train={"steps": 1, "micro_batch": 1, "lanes": 4},
        optimizer={"name": "muon", "learning_rate": 0.01, "weight_decay": 0.1},
        schedule={"name": "constant", "warmup": 0.0},
        checkpoint={"every": "1 steps"},
        health={"on_nonfinite": "rollback"},  # so that the weights before the first step are saved
    )
    for workers in {workers for workers, _ in ways.values()}:
        chosen = {name: overrides for name, (count, overrides) in ways.items() if count == workers}
        run(tmp_path, workers, [job(config, name, "muon", *overrides.split()) for name, overrides in chosen.items()])
    for name in ways:
        store = CheckpointStore(tmp_path / "runs" / name / "checkpoints")
        before, after = (store.load(store.info(step)) for step in (0, 1))
        shape = load_resolved(tmp_path / "runs" / name / "config.yaml").model.model_copy(update={"vocab_size": 320})
        moments = {key: after[key] for key in after if key.startswith("optimizer.momentum_buffer.")}
        several = 0
        for key, momentum in moments.items():
            weight = key.removeprefix("optimizer.momentum_buffer.")
            change = after[f"model.{weight}"].double() - before[f"model.{weight}"].double()
            found = apart(shape, weight, change)
            start, gradient = (apart(shape, weight, t) for t in (before[f"model.{weight}"], momentum / 0.05))
            several += len(found) > 1
            for part, mine in found.items():
                expected = exact(start[part], gradient[part][None], 0.01, 0.1)
                # In fp32, rounded once more as part of a weight.
                assert distance(mine, expected) < 1e-4, (name, weight, part)
        assert several == 4 and len(moments) == 8

"""Every way to split a model trains the same model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.telemetry.metrics import read_metrics
from support import state_hash, write_config

STEPS = 12
DATA_PARALLEL = ("ddp", "zero1", "zero2", "zero3")


class Trials:
    """Runs of one config under many strategies; those of as many workers share their processes."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.folder, self.config = folder, config
        self.jobs: dict[int, list[dict[str, Any]]] = {}

    def add(self, name: str, workers: int, *overrides: str, copy_of: str | None = None) -> str:
        source = str(self.folder / "runs" / copy_of) if copy_of else None
        job = {"config": str(self.config), "overrides": [f"name={name}", *overrides], "copy_of": source}
        self.jobs.setdefault(workers, []).append(job)
        return name

    def run(self) -> None:
        for workers, jobs in self.jobs.items():
            path = self.folder / f"jobs-{workers}.json"
            path.write_text(json.dumps(jobs))
            script = str(Path(__file__).with_name("strategies_worker.py"))
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
            command = [sys.executable, *(start if workers > 1 else []), script, str(path)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
            assert result.returncode == 0, result.stderr[-4000:]
        self.jobs = {}

    def losses(self, name: str) -> list[float]:
        return self.metric(name, "train/loss")

    def metric(self, name: str, metric: str) -> list[float]:
        _, values = read_metrics(self.folder / "runs" / name).series(metric)
        return [float(value) for value in values]

    def hash(self, name: str) -> str:
        return state_hash(self.folder / "runs" / name)


@pytest.fixture
def trials(corpus: Path, tmp_path: Path) -> Callable[..., Trials]:
    def make(**sections: Any) -> Trials:
        data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
        values: dict[str, Any] = {
            "train": {"steps": STEPS, "micro_batch": 1, "lanes": 4},
            "model": {"dropout": 0.0},
            "checkpoint": {"every": f"{STEPS // 2} steps"},
            "evaluation": {"rows": 5},
        }
        data |= sections.pop("data", {})
        for name, section in sections.items():
            values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section
        return Trials(tmp_path, write_config(tmp_path, data=data, **values))

    return make


def close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))


def test_all_strategies_learn_what_one_worker_does(trials: Callable[..., Trials]) -> None:
    """Where mistakes stay silent: rows with unequally many tokens, several micro-batches, clipping, a shared matrix."""
    runs = trials(data={"packing": "pad"}, model={"tie_embeddings": True}, train={"lanes": 4, "max_grad_norm": 0.3})
    runs.add("single", 1)
    names = [runs.add(f"{s}-{n}", n, f"parallel.strategy={s}") for n in (2, 4) for s in DATA_PARALLEL]
    names.append(runs.add("hsdp-4", 4, "parallel.strategy=hsdp"))
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


def test_elastic_runs_have_the_same_bits_under_every_strategy(trials: Callable[..., Trials]) -> None:
    # Widths that do not fill vectors: kernels that treat the last elements of a shard otherwise would show.
    runs = trials(determinism="elastic", model={"dropout": 0.1, "dim": 36, "heads": 3, "kv_heads": 1, "ffn_dim": 75})
    names = [runs.add("single", 1)]
    names += [runs.add(f"{s}-{n}", n, f"parallel.strategy={s}") for n in (2, 4) for s in DATA_PARALLEL]
    names.append(runs.add("hsdp-4", 4, "parallel.strategy=hsdp"))
    runs.run()
    hashes = {name: runs.hash(name) for name in names}
    assert len(set(hashes.values())) == 1, hashes


def resumed_pairs(runs: Trials, strategies: tuple[str, ...]) -> list[str]:
    """Save under every strategy, go on under every other; returns the names of the runs that did."""
    runs.add("single", 1)
    for strategy in strategies:
        runs.add(strategy, 2, f"parallel.strategy={strategy}")
    runs.run()
    names = [
        runs.add(f"{a}-{b}", 1 if b == "single" else 2, f"parallel.strategy={b}", copy_of=a)
        for a in ("single", *strategies)
        for b in ("single", *strategies)
        if a != b
    ]
    runs.run()
    return names


def test_a_run_goes_on_under_any_other_strategy(trials: Callable[..., Trials]) -> None:
    runs = trials()
    names = resumed_pairs(runs, DATA_PARALLEL)
    expected = runs.losses("single")
    assert not [(name, runs.losses(name), expected) for name in names if not close(runs.losses(name), expected)]


def test_muon_goes_on_under_any_other_strategy_with_the_same_bits(trials: Callable[..., Trials]) -> None:
    """It rounds to bf16 on its way, which blows up the last bits of a gradient: only bits can be compared."""
    runs = trials(optimizer={"name": "muon"}, determinism="elastic")
    names = resumed_pairs(runs, ("ddp", "zero1", "zero2"))
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


def test_experts_learn_under_every_strategy_what_they_do_on_one_worker(trials: Callable[..., Trials]) -> None:
    runs = trials(model=EXPERTS)
    runs.add("single", 1)
    names = [runs.add(s, 2, f"parallel.strategy={s}") for s in DATA_PARALLEL]
    runs.run()
    expected = runs.losses("single")
    assert expected[-1] < expected[0] - 0.5
    assert not [(name, runs.losses(name), expected) for name in names if not close(runs.losses(name), expected)]


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

"""Fake run directories, as the files of real ones look."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

START = 1_760_000_000.0

MakeRun = Callable[..., Path]


def record(step: int, attempt: int, **more: Any) -> dict[str, Any]:
    """One step's record; its loss is a function of the step."""
    return {
        "step": step,
        "attempt": attempt,
        "time": START + step + 100 * attempt,
        "train/loss": 9.0 - math.log1p(step),
        "train/grad_norm": 1.0 / step,
        "train/learning_rate": 3e-4,
        "train/skipped_steps": 0.0,
        "speed/tokens_per_second": 10_000.0 + step,
        "speed/step_seconds": 0.5,
        **more,
    }


def write_metrics(run: Path, records: list[dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in records))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run that was killed at step 60, went on from step 40 and finished at step 100."""

    def make(name: str = "demo", learning_rate: float = 3e-4) -> Path:
        run = tmp_path / "runs" / name
        first = [record(step, 1) for step in range(1, 61)]
        second = [record(step, 2, **{"cost/spent_usd": step / 100}) for step in range(41, 101)]
        evaluations = [
            {"step": step, "attempt": 1 + (step > 40), "time": START, "evaluation/loss": 10 - step / 20}
            for step in (50, 100)
        ]
        write_metrics(run, [*first, *second[:10], evaluations[0], *second[10:], evaluations[1]])
        config = {
            "name": name,
            "determinism": "run",
            "data": {"store": f"data/{name}"},
            "model": {"preset": "4m", "dim": 192, "layers": 6, "from_pretrained": None},
            "train": {"steps": 100, "global_batch": 32, "sequence_length": 256, "precision": "fp32"},
            "optimizer": {"learning_rate": learning_rate},
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        facts = {
            "command": ["headway", "train", "demo.yaml"],
            "folder": str(tmp_path),
            "fingerprints": {"config": "c" * 64, "data": "d" * 64, "tokenizer": "e" * 64},
            "model": {"parameters": 4_000_000},
            "git": {"commit": "f" * 40, "dirty": True, "diff": "+a < b\n"},
            "environment": {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "variables": {"OMP_NUM_THREADS": "2"}},
            "hardware": {"cpu": "Test CPU", "cores_usable": 2, "memory_gib": 8.0, "accelerators": []},
        }
        (run / "run.json").write_text(json.dumps(facts))
        write_attempt(run, 1, started=START, pid=1, host="elsewhere")
        write_attempt(
            run,
            2,
            started=START + 200,
            ended=START + 300,
            outcome="finished",
            exit_code=0,
            first_step=40,
            last_step=100,
        )
        for step in (40, 100):
            write_checkpoint(run, step)
        write_store(tmp_path / "data" / name)
        (run / "samples.txt").write_text("<script>alert(1)</script> Once upon a time")
        return run

    return make


def write_attempt(run: Path, number: int, **facts: Any) -> None:
    folder = run / "attempts" / f"{number:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempt.json").write_text(json.dumps({"number": number, **facts}))


def write_checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    manifest = {
        "step": step,
        "state_sha256": f"{step:064x}",
        "files": {"shard-00000.safetensors": {"bytes": 1_000_000, "sha256": "0" * 64}},
        "context": {"time": START + step, "attempt": 1},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_store(store: Path) -> None:
    store.mkdir(parents=True)
    part = {"tokens": 900_000, "documents": 95, "shards": []}
    manifest = {
        "tokenizer": {"vocab_size": 8192},
        "splits": {"train": {"python": part}, "validation": {"python": {**part, "tokens": 100_000, "documents": 5}}},
    }
    (store / "manifest.json").write_text(json.dumps(manifest))

"""Runs of one config under many strategies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headway.telemetry.metrics import read_metrics
from support.runs import run_workers, state_hash

STEPS = 12
_WORKER = Path(__file__).parents[1] / "distributed" / "strategies_worker.py"


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
            run_workers(workers, _WORKER, path)
        self.jobs = {}

    def losses(self, name: str) -> list[float]:
        return self.metric(name, "train/loss")

    def metric(self, name: str, metric: str) -> list[float]:
        _, values = read_metrics(self.folder / "runs" / name).series(metric)
        return [float(value) for value in values]

    def hash(self, name: str) -> str:
        return state_hash(self.folder / "runs" / name)


def close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))

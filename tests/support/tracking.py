"""Run directories as the files of real ones look, written record by record while readers follow them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import yaml

from headway.core.machine.system import host_name


class WrittenRun:
    """A run directory under construction.

    Args:
        path: The directory.
        started: Start of the run, Unix seconds.
        config: Sections of its config beside the usual ones.
    """

    def __init__(self, path: Path, started: float = 1_760_000_000.0, **config: Any) -> None:
        self.path, self.started, self.attempt = path, started, 0
        path.mkdir(parents=True)
        values = {
            "name": path.name,
            "train": {"steps": 100, "global_batch": 8, "sequence_length": 64},
            "supervise": {"max_failures": 3, "failure_window": "1 h"},
            **config,
        }
        (path / "config.yaml").write_text(yaml.safe_dump(values))
        (path / "run.json").write_text(json.dumps({"variables": {"SLURM_JOB_ID": "4711"}}))

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def begin(self, started: float | None = None, *, alive: bool = False) -> None:
        """Begin an attempt: of this process if it is alive, else of one that is gone."""
        self.attempt += 1
        born = psutil.Process().create_time() if alive else None
        self.write_attempt(
            started=born or started or self.started, host=host_name(), pid=os.getpid() if alive else 2**22 + 1
        )

    def end(self, ended: float, outcome: str, exit_code: int = 0) -> None:
        """End the attempt."""
        record = json.loads((self.folder / "attempt.json").read_text())
        self.write_attempt(**record, ended=ended, outcome=outcome, exit_code=exit_code)

    @property
    def folder(self) -> Path:
        return self.path / "attempts" / f"{self.attempt:03d}"

    def write_attempt(self, **record: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "attempt.json").write_text(json.dumps(record))

    def step(self, step: int, time: float | None = None, **more: Any) -> None:
        """Append a step's record."""
        values = {
            "train/loss": 5.0 - step / 100,
            "train/items": 512.0,
            "speed/step_seconds": 2.0,
            "speed/tokens_per_second": 256.0,
            "speed/data_wait_share": 0.25,
        }
        self.append(step, self.started + 2.0 * step if time is None else time, **{**values, **more})

    def append(self, step: int, time: float, **values: Any) -> None:
        record = {"step": step, "attempt": self.attempt, "time": time, **values}
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, step: int, time: float) -> None:
        """Publish a checkpoint."""
        manifest = self.path / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.write_text("{}")
        os.utime(manifest, (time, time))

"""Studies of a task of milliseconds, and what is compared of two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from headway.lab.tune.study import open_study
from support.runs import state_hash

#: A task whose loss depends on the learning rate and on the width; its steps take as long as an option says.
TASK = """\
import time
from dataclasses import dataclass

import torch

import headway


@dataclass
class Options:
    width: int = 4
    seconds: float = 0.05


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


def build(config, options: Options):
    def loss(model, batch):
        time.sleep(options.seconds)
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

    model = torch.nn.Sequential(torch.nn.Linear(4, options.width), torch.nn.Linear(options.width, 1))
    return headway.Task(model, Rows(64), loss, validation=Rows(8))
"""


def write_study(folder: Path, space: dict[str, Any] | None = None, **sections: Any) -> tuple[Path, Path]:
    """Write a task, its config and a space into a folder, and return the paths of the last two."""
    values: dict[str, Any] = {
        "name": "toy",
        "task": {"function": "toy_task:build", "options": {"seconds": 0.05}},
        "train": {"steps": 12, "global_batch": 4, "micro_batch": 4, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-2},
        "parallel": {"threads": 1},
        "checkpoint": {"every": "4 steps"},
        "evaluation": {"every": "2 steps"},
        "telemetry": {"report": False},
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(values.get(name), dict) else section
    (folder / "toy_task.py").write_text(TASK)
    config, file = folder / "toy.yaml", folder / "space.yaml"
    config.write_text(yaml.safe_dump(values))
    file.write_text(yaml.safe_dump(space or SPACE))
    return config, file


SPACE: dict[str, Any] = {
    "space": {"optimizer.learning_rate": {"log": [1e-4, 1e-1]}, "task.options.width": {"choice": [2, 8]}},
    "sampler": "tpe",
    "stopping": {"name": "asha", "first_steps": 2},
    "trials": 4,
    "keep": 100,
}


def outcome(folder: Path) -> dict[str, Any]:
    """Return all that a kill must not change in a study: trials, values, decisions, states, and the best one."""
    study = open_study(folder)
    journal = study.open_journal()
    trials = []
    for one in journal.records:
        stopped = one.notes.get("stopped")
        # A trial that was given up has done a few steps more, which depend on when that was seen.
        is_whole = one.state == "complete" and stopped is None
        state = state_hash(study.run_of(one.number)) if is_whole else None
        trials.append([one.number, one.state, dict(one.values), dict(one.reports), one.objectives, stopped, state])
    return {"trials": trials, "best": [one.number for one in journal.best()]}


def steps_done(folder: Path) -> int:
    """Return the number of records of all runs of a study."""
    return sum(len(path.read_bytes().splitlines()) for path in folder.glob("runs/*/metrics.jsonl"))


def attempts(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's attempts."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("attempts/*/attempt.json"))]

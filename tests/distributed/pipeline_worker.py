"""Run under torchrun: the first and the last stage have the same embedding and moments after every step, bit for bit.

Dropout is on: workers must draw the same masks when a run is repeated, and no two of them the same ones, whether they
have other rows, other layers or other positions.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from headway import Callback
from headway.config import load_config, resolve
from headway.data.remote_store import open_store
from headway.models.build import complete
from headway.run.session.attempt import RunOptions
from headway.run.session.preflight import RunPlan
from headway.run.session.session import run_in_this_process
from headway.training.task import language_model_task


def digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


masks: list[str] = []
dropout = F.dropout


def watched(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    y = dropout(x, p, training)
    if training:
        masks.append(digest(y == 0))
    return y


class SameInBothStages(Callback):
    steps = 0

    def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
        self.compare_masks(job)
        self.compare_copies(job)
        SameInBothStages.steps += 1

    def compare_masks(self, job: Any) -> None:
        first = job.world.gather_json(masks[0])
        assert len(set(first)) == job.world.size, first
        masks.clear()

    def compare_copies(self, job: Any) -> None:
        blocks = job.state.blocks()
        mine = {n: [digest(b.local), *b.offset] for n, b in blocks.items() if n.endswith("embedding.weight")}
        everyone = job.world.gather_json(mine)
        places = [job.world.mesh.coordinates(rank) for rank in range(job.world.size)]
        holders = [
            said for said, place in zip(everyone, places, strict=True) if place["pp"] in (0, job.world.mesh.pp - 1)
        ]
        copies: dict[str, set[str]] = {}
        for said in holders:
            assert "model.embedding.weight" in said
            for name, (text, *offset) in said.items():
                copies.setdefault(f"{name} {offset}", set()).add(text)
        assert all(len(texts) == 1 for texts in copies.values()), copies
        assert any(name.startswith("optimizer.exp_avg.") for name in copies)


def train(name: str, *overrides: str) -> str:
    config = resolve(load_config(Path(sys.argv[1]), [f"name={name}", "train.steps=4", *overrides]))
    model = complete(config.model, open_store(config.data).vocab_size)
    config = config.model_copy(update={"model": model})
    run_in_this_process(RunPlan.of(config, RunOptions()), language_model_task, [SameInBothStages()])
    manifest = config.run_directory / "checkpoints" / "step-00000004" / "manifest.json"
    return str(json.loads(manifest.read_text())["state_sha256"])


F.dropout = watched  # type: ignore[assignment]
hashes = {}
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    hashes[strategy] = train(strategy, "parallel.pipeline=2", f"parallel.strategy={strategy}")
assert hashes["ddp"] == train("again", "parallel.pipeline=2", "parallel.strategy=ddp")
train("four", "parallel.pipeline=4")
grid = ("parallel.pipeline=2", "parallel.tensor=2", "train.micro_batch=4", "train.lanes=1")
assert train("grid", *grid) == train("grid-again", *grid)
train("grid-context", "parallel.pipeline=2", "parallel.context=2", "train.micro_batch=4", "train.lanes=1")
assert SameInBothStages.steps == 36

"""Small states to save, with every kind of tensor that a training run may hold."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.checkpoint.format.manifest import Manifest
from headway.checkpoint.save.writer import CheckpointWriter
from headway.checkpoint.store import CheckpointStore
from headway.config import Config, LaneGrid
from headway.core.types import Block, StateBlocks
from headway.parallel.pipeline import Pipeline
from headway.parallel.strategy import Strategy
from headway.parallel.world import World
from headway.training.assembled import Assembled
from headway.training.state import TrainState
from headway.training.task import Task


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """A flat state of some hundred bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embedding": torch.randn(6, 4, generator=generator),
        "model.transposed": torch.randn(3, 5, generator=generator).t(),
        "model.half": torch.randn(2, 3, generator=generator).bfloat16(),
        "model.mask": torch.rand(7, generator=generator) > 0.5,
        "model.empty": torch.zeros(0, 4),
        "optimizer.step": torch.tensor(float(seed)),
        "optimizer.counts": torch.arange(5) + seed,
    }


def save(store: CheckpointStore, step: int, seed: int | None = None) -> Manifest:
    """Save the state of `seed`, by default the step's own."""
    return store.save(step, make_state(step if seed is None else seed), {"step": step}, {"attempt": 1, "world_size": 2})


def blocks(state: dict[str, torch.Tensor]) -> StateBlocks:
    """What a worker that has all of a state has of it."""
    return {name: Block.whole(tensor) for name, tensor in state.items()}


def submit(writer: CheckpointWriter, step: int) -> None:
    """Hand the state of a step over to be saved."""
    assert writer.submit(step, blocks(make_state(step)), {"step": step}, {"attempt": 1}) >= 0


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden things included."""
    return sorted(path.name for path in folder.iterdir())


def parts(
    config: Config, task: Task, state: TrainState, strategy: Strategy, world: World, pipeline: Pipeline | None = None
) -> Assembled:
    """What is trained, for tests that give a step its lanes themselves."""
    return Assembled(config, task, state, strategy, world, LaneGrid(1, 1, 1), pipeline)

"""What a worker trains, put together (`Assembled`): what travels together through training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import Config, LaneGrid

if TYPE_CHECKING:
    from headway.parallel.pipeline import Pipeline
    from headway.parallel.strategy import Strategy
    from headway.parallel.world import World
    from headway.training.state import TrainState
    from headway.training.task import Task


@dataclass(frozen=True)
class Assembled:
    """What one worker trains, put together by `session.assemble.assemble`: the parts stay, their contents change."""

    config: Config
    """Resolved."""
    task: Task
    state: TrainState
    """The model, under its strategy, with its optimizer."""
    strategy: Strategy
    world: World
    grid: LaneGrid
    pipeline: Pipeline | None = None
    """This worker's stages of the model, if other workers have the rest."""

    @property
    def total_steps(self) -> int:
        """The number of steps of the run."""
        assert self.config.train.steps is not None, "the config is resolved"
        return self.config.train.steps

    @property
    def lanes(self) -> range:
        """The lanes that this worker computes."""
        return self.grid.of_worker(self.world.data_rank, self.world.mesh.data)

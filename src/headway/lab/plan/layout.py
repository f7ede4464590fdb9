"""How one step is split over workers: the strategy, the degrees, and what each worker computes at a time."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import (
    Config,
    MeshShape,
    StrategySpec,
    effective_strategy,
    find_strategy,
    resolve_lanes,
    resolve_mesh,
)
from headway.config.strategies import FOR_COPIES
from headway.core.types import Checkpointing

#: Modes of activation checkpointing, in decreasing order of memory.
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """The settings besides the model that determine memory and time of a step."""

    strategy: StrategySpec
    mesh: MeshShape
    micro_batch: int
    """Rows of a micro-batch."""
    micro_batches: int
    """Micro-batches of one worker in one step, over all of its lanes."""
    lanes: int
    """Lanes of one worker."""
    checkpointing: Checkpointing
    elastic: bool
    reshard_after_forward: bool
    prefetch: int | None = None
    """Layers to prefetch; None for PyTorch's default."""

    @classmethod
    def of(cls, config: Config, workers: int) -> Layout:
        """Return the layout that `headway train` would use for a config with this many workers.

        Raises:
            ConfigError: as `resolve_mesh` and `resolve_lanes`.
        """
        mesh = resolve_mesh(config, workers)
        grid = resolve_lanes(config, mesh.data)
        lanes = grid.lanes // mesh.data
        strategy = find_strategy(effective_strategy(config.parallel.strategy, mesh))
        is_alone = not strategy.sums_gradients and strategy.name != config.parallel.strategy
        if is_alone and has_copied_experts(config):
            strategy = find_strategy(FOR_COPIES)  # as in `make_strategy`
        return cls(
            strategy=strategy,
            mesh=mesh,
            micro_batch=grid.micro_batch,
            micro_batches=lanes * grid.micro_batches,
            lanes=lanes,
            checkpointing=config.train.activation_checkpointing,
            elastic=config.determinism == "elastic",
            reshard_after_forward=config.parallel.reshard_after_forward,
            prefetch=config.parallel.prefetch,
        )

    @property
    def shards(self) -> int:
        """Workers that share each weight if weights are sharded; context-parallel workers are among them."""
        return self.mesh.dp_shard * self.mesh.cp


def has_copied_experts(config: Config) -> bool:
    """Return whether tensor-parallel workers have the same experts, but different tokens."""
    return config.model.experts is not None and config.parallel.tensor > config.parallel.expert

"""How one step is spread: the strategy, the degrees, and what each worker computes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.config import DEEPSPEED, MeshShape, effective_strategy, resolve_lanes, resolve_mesh

if TYPE_CHECKING:
    from headway.config import Config

#: Every strategy, from the one that keeps most on each worker to the one that keeps least; those of DeepSpeed last.
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp", *DEEPSPEED)

#: Kinds of activation checkpointing, from the one that keeps most.
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """What decides the memory and the time of a step, beside the model."""

    strategy: str
    """One of `STRATEGIES`."""
    mesh: MeshShape
    micro_batch: int
    """Rows."""
    micro_batches: int
    """Of one worker in one step, over all of its lanes."""
    lanes: int
    """Of one worker."""
    checkpointing: Literal["none", "selective", "full"]
    elastic: bool
    reshard_after_forward: bool
    prefetch: int | None = None
    """Layers ahead; None for PyTorch's own choice."""

    @classmethod
    def of(cls, config: Config, workers: int) -> Layout:
        """What `headway train` would do with a config on so many workers.

        Raises:
            ConfigError: as `resolve_mesh` and `resolve_lanes`.
        """
        mesh = resolve_mesh(config, workers)
        grid = resolve_lanes(config, mesh.data)
        lanes = grid.lanes // mesh.data
        strategy = effective_strategy(config.parallel.strategy, mesh)
        if strategy == "single" != config.parallel.strategy and has_copied_experts(config):
            strategy = "ddp"  # as `make_strategy`
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
        """Workers that share each weight, where weights are cut; those of one row have the same ones."""
        return self.mesh.dp_shard * self.mesh.cp

    @property
    def is_sharded(self) -> bool:
        """Whether weights are cut, and brought together a unit at a time."""
        return self.strategy in ("zero3", "hsdp")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed has weights, gradients and moments."""
        return self.strategy in DEEPSPEED


def has_copied_experts(config: Config) -> bool:
    """Whether tensor-parallel workers have the same experts, for tokens of their own."""
    return config.model.experts is not None and config.parallel.tensor > config.parallel.expert

"""How one step is spread: the strategy, the degrees, and what each worker computes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.config import DEEPSPEED, MeshShape, effective_strategy, resolve_lanes, resolve_mesh
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config import Config

#: Every strategy, from the one that keeps most on each worker to the one that keeps least.
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")

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
            ConfigError: as `resolve_mesh` and `resolve_lanes`; or a layer keeps what no formula here counts.
        """
        _refuse_uncounted(config)
        mesh = resolve_mesh(config, workers)
        grid = resolve_lanes(config, mesh.data)
        lanes = grid.lanes // mesh.data
        return cls(
            strategy=effective_strategy(config.parallel.strategy, mesh),
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


def _refuse_uncounted(config: Config) -> None:
    """What no formula here counts is not guessed."""
    train = config.train
    uncounted = {
        "train.precision": (train.precision == "fp8", "bf16 keeps about as much"),
        "train.activation_checkpointing": (
            train.activation_checkpointing == "selective" and config.model.experts is not None,
            "full keeps less, none more; which products of experts are kept depends on their kernel",
        ),
        "parallel.strategy": (config.parallel.strategy in DEEPSPEED, "zero1, zero2 and zero3 divide the same"),
    }
    for key, (yes, near) in uncounted.items():
        if yes:
            raise ConfigError(
                f"a plan does not count what '{key}' asks for", where=key, fix=f"plan with another: {near}"
            )

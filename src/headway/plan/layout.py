"""How one step is spread: the strategy, the degrees, and what each worker computes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.config import MeshShape, resolve_lanes, resolve_mesh
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.config import Config

#: Every strategy, from the one that keeps most on each worker to the one that keeps least.
STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")


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
    checkpointing: Literal["none", "full"]
    elastic: bool
    reshard_after_forward: bool

    @classmethod
    def of(cls, config: Config, workers: int) -> Layout:
        """What `headway train` would do with a config on so many workers.

        Raises:
            ConfigError: as `resolve_mesh` and `resolve_lanes`; or a layer keeps what no formula here counts.
        """
        checkpointing = config.train.activation_checkpointing
        if checkpointing == "selective":
            raise ConfigError(
                "what selective activation checkpointing keeps is not planned for",
                where="train.activation_checkpointing",
                fix="plan with train.activation_checkpointing=full, which keeps less, or =none, which keeps more",
            )
        mesh = resolve_mesh(config, workers)
        grid = resolve_lanes(config, mesh.data)
        lanes = grid.lanes // mesh.data
        return cls(
            strategy=effective_strategy(config.parallel.strategy, mesh),
            mesh=mesh,
            micro_batch=grid.micro_batch,
            micro_batches=lanes * grid.micro_batches,
            lanes=lanes,
            checkpointing=checkpointing,
            elastic=config.determinism == "elastic",
            reshard_after_forward=config.parallel.reshard_after_forward,
        )

    @property
    def is_sharded(self) -> bool:
        """Whether weights are cut, and brought together a unit at a time."""
        return self.strategy in ("zero3", "hsdp")


def effective_strategy(name: str, mesh: MeshShape) -> str:
    """The strategy behind a name: alone there is nobody to divide anything with."""
    if mesh.data == 1:
        return "single"
    return {"auto": "ddp", "fsdp": "zero3"}.get(name, name)

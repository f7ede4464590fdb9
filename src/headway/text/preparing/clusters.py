"""The protocol of clusters that process units of input (`headway data prepare --on`), and the table of them."""

from __future__ import annotations

from typing import Protocol, cast

from headway.config import Config
from headway.core.functions import find_target
from headway.text.preparing.pools import UnitPool

#: Each name of `--on`, and where its pool is made.
POOLS = {
    "ray": "headway.api.clusters.ray_tasks:RayPool",
    "slurm": "headway.api.clusters.slurm_array:SlurmPool",
}


class DataPool(UnitPool, Protocol):
    """A cluster that processes units of input."""

    def __init__(self, config: Config, *, tasks: int | None, workers: int) -> None:
        """Make a pool; nothing is asked or started yet.

        Args:
            config: The config; `launch` says where and how.
            tasks: Number of tasks to run at a time; the pool's own choice if None.
            workers: Processes of each task.
        """
        ...

    def describe(self, units: int) -> str:
        """Return what would be submitted for so many units, in lines for people."""
        ...


def find_pool(name: str) -> type[DataPool]:
    """Return a pool by its name, or one of your own as `package.module:NAME`.

    Raises:
        ConfigError: there is none of that name.
    """
    return cast(type[DataPool], find_target(POOLS, name, f"data cannot be prepared on '{name}'"))

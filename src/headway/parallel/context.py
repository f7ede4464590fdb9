"""Context parallelism: the positions of every row are shared by several workers, which all have the same weights."""

from __future__ import annotations

from torch import nn

from headway.core.errors import ConfigError
from headway.parallel.world import World


def cut_rows(module: nn.Module, world: World) -> None:
    """Let a model compute this worker's positions of each row, together with the others.

    Args:
        module: Declares by `share_positions(group)` that it can: it then takes whole rows, the same on all workers of
            the group, and its loss is that of its own positions.

    Raises:
        ConfigError: the module does not declare it.
    """
    declared = getattr(module, "share_positions", None)
    if declared is None:
        raise ConfigError(
            f"{type(module).__name__} does not say how the positions of a row may be shared by workers",
            where="parallel.context",
            fix="parallel.context=1, or give the module a method share_positions",
        )
    declared(world.device_mesh["cp"].get_group())

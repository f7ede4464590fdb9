"""Context parallelism: several workers with the same weights share the positions of every row."""

from __future__ import annotations

from torch import nn

from headway.core.errors import ConfigError
from headway.parallel.world import World


def cut_rows(module: nn.Module, world: World) -> None:
    """Make a model compute only this worker's positions of each row, together with the other workers.

    Args:
        module: Its `share_positions(group)` enables this: it then takes whole rows, identical on all workers of the
            group, and returns the loss of its own positions.

    Raises:
        ConfigError: the module has no such method.
    """
    declared = getattr(module, "share_positions", None)
    if declared is None:
        raise ConfigError(
            f"{type(module).__name__} does not declare how workers may share the positions of a row",
            where="parallel.context",
            fix="parallel.context=1, or give the module a method share_positions",
        )
    declared(world.device_mesh["cp"].get_group())

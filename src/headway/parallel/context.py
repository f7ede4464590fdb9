"""Context parallelism: several workers with the same weights share the positions of every row."""

from __future__ import annotations

from torch import nn

from headway.core.errors import ConfigError
from headway.core.model_protocol import ContextParallelizable
from headway.parallel.world import World


def cut_rows(module: nn.Module, world: World) -> None:
    """Make a model compute only this worker's positions of each row, together with the other workers.

    Args:
        module: It declares that it can as a `ContextParallelizable`.

    Raises:
        ConfigError: the module does not declare it.
    """
    if not isinstance(module, ContextParallelizable):
        raise ConfigError(
            f"{type(module).__name__} does not declare how workers may share the positions of a row",
            where="parallel.context",
            fix="parallel.context=1, or give the module a method share_positions",
        )
    module.share_positions(world.device_mesh["cp"].get_group())

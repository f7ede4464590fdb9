"""Whether an agent has started this process as one of several workers."""

from __future__ import annotations

import os

from headway.core.errors import ConfigError


def world_size_from_environment() -> int | None:
    """Number of workers when an agent (torchrun, or Ray with its variables) started this process, else None.

    Raises:
        ConfigError: the variables are there, but hold no number.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"'{text}' is no number of workers",
            where="WORLD_SIZE",
            fix="start workers with torchrun, or unset RANK WORLD_SIZE",
        )
    return int(text)

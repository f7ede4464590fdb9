"""Whether an agent has started this process as one of several workers."""

from __future__ import annotations

import os

from headway.core.errors import ConfigError

_FIX = "start workers with torchrun, or unset RANK WORLD_SIZE"

#: The file in which workers meet that Headway starts itself, all on one machine (`launch.local_workers`).
RENDEZVOUS_VARIABLE = "HEADWAY_RENDEZVOUS_FILE"


def world_size_from_environment() -> int | None:
    """Number of workers when an agent (torchrun, or Ray with its variables) started this process, else None.

    Raises:
        ConfigError: the variables are there, but hold no number.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"'{text}' is no number of workers", where="WORLD_SIZE", fix=_FIX)
    return int(text)


def workers_of_this_machine(size: int) -> int:
    """How many of the workers are on this machine: as their agent says (torchrun does), else all of them.

    Args:
        size: Number of workers.

    Raises:
        ConfigError: the variable is there, but holds no number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None or size == 1:
        return size
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"'{text}' is no number of workers", where="LOCAL_WORLD_SIZE", fix=_FIX)
    return min(size, int(text))


def are_all_on_this_machine(size: int) -> bool:
    """Return whether all workers are known to be on this machine: whoever started them says so.

    Args:
        size: Number of workers.
    """
    return size == 1 or RENDEZVOUS_VARIABLE in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(size)


def place_from_environment(size: int) -> tuple[int, int]:
    """Number of this worker among all of them, and among those of its machine.

    Args:
        size: Number of workers, more than one.

    Raises:
        ConfigError: one of them is missing or no such number, or it is not said where the workers meet.
    """
    variables = {"RANK": size, "LOCAL_RANK": size}
    given = {"LOCAL_RANK": "0", **os.environ}
    if RENDEZVOUS_VARIABLE not in given:
        variables["MASTER_PORT"] = 2**16
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name)]:
            name = missing[0]
            raise ConfigError(f"{size} workers were started that do not know where to meet", where=name, fix=_FIX)
    for name, limit in variables.items():
        if not given[name].isdecimal() or int(given[name]) >= limit:
            raise ConfigError(f"'{given[name]}' is no number from 0 to {limit - 1}", where=name, fix=_FIX)
    return int(given["RANK"]), int(given["LOCAL_RANK"])

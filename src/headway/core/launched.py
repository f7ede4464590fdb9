"""Detection of a launcher that has started this process as one of several workers."""

from __future__ import annotations

import os

from headway.core.errors import ConfigError

_FIX = "start workers with torchrun, or unset RANK WORLD_SIZE"

#: Path of the rendezvous file of workers that Headway itself starts on one machine.
RENDEZVOUS_VARIABLE = "HEADWAY_RENDEZVOUS_FILE"

#: What the user had set as OMP_NUM_THREADS, in workers that Headway itself starts: they get a number in any case.
THREADS_VARIABLE = "HEADWAY_OMP_NUM_THREADS"


def most_threads() -> int | None:
    """Return the most threads that a process may compute with, as the user has set by OMP_NUM_THREADS; None if not.

    torchrun sets 1 for several workers if nothing is set; that is no wish of the user.
    """
    text = os.environ.get(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", ""))
    first = text.split(",")[0].strip()  # a list has a number for each level of nested parallel regions
    if not first.isdecimal() or int(first) < 1 or (first == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        return None
    return int(first)


def world_size_from_environment() -> int | None:
    """Return the number of workers if a launcher (torchrun, or Ray with its variables) started this process, else None.

    Raises:
        ConfigError: the variables are set but hold no number.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    text = os.environ["WORLD_SIZE"]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"'{text}' is no number of workers", where="WORLD_SIZE", fix=_FIX)
    return int(text)


def workers_of_this_machine(size: int) -> int:
    """Return how many workers run on this machine, as the launcher says (torchrun does); otherwise all of them.

    Args:
        size: Number of workers.

    Raises:
        ConfigError: the variable is set but holds no number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None or size == 1:
        return size
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"'{text}' is no number of workers", where="LOCAL_WORLD_SIZE", fix=_FIX)
    return min(size, int(text))


def are_all_on_this_machine(size: int) -> bool:
    """Return whether all workers are known to run on this machine, as their launcher says.

    Args:
        size: Number of workers.
    """
    return size == 1 or RENDEZVOUS_VARIABLE in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(size)


def place_from_environment(size: int) -> tuple[int, int]:
    """Return the rank of this worker among all workers, and among those of its machine.

    Args:
        size: Number of workers, more than one.

    Raises:
        ConfigError: a rank is missing or invalid, or no rendezvous address is set.
    """
    variables = {"RANK": size, "LOCAL_RANK": size}
    given = {"LOCAL_RANK": "0", **os.environ}
    if RENDEZVOUS_VARIABLE not in given:
        variables["MASTER_PORT"] = 2**16
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name)]:
            name = missing[0]
            raise ConfigError(f"{size} workers were started without an address to meet at", where=name, fix=_FIX)
    for name, limit in variables.items():
        if not given[name].isdecimal() or int(given[name]) >= limit:
            raise ConfigError(f"'{given[name]}' is no number from 0 to {limit - 1}", where=name, fix=_FIX)
    return int(given["RANK"]), int(given["LOCAL_RANK"])

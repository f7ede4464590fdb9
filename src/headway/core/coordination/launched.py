"""Detection of a launcher that has started this process as one of several workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from headway.core.coordination.launch_variables import MACHINES, NODE, NODE_NUMBERS
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


#: The part of a machine in a training on several machines, for the process that starts its workers (`MachinePart`).
_PART_VARIABLE = "HEADWAY_MACHINE_PART"
#: Makes the first worker's store listen on the address of MASTER_ADDR only, instead of on every interface.
BIND_VARIABLE = "HEADWAY_BIND_STORE"
#: Tells workers that machines share no disk: each has a folder of its own, and checkpoints go through the remote tier.
OWN_DISKS_VARIABLE = "HEADWAY_OWN_DISKS"


#: Variables by which jobs of Slurm, Kubernetes, SkyPilot, Ray and Metaflow can be told.
_SCHEDULERS = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "SKYPILOT_TASK_ID", "RAY_JOB_ID", "METAFLOW_RUN_ID")


@dataclass(frozen=True)
class MachinePart:
    """The workers of one machine among those of several machines."""

    first_rank: int
    world_size: int
    address: str
    """Where the workers meet: an address of the first machine, and a port that is free there."""
    port: int
    interface: str | None
    """The network interface of this machine that reaches the others; None if unknown."""
    own_disks: bool = False
    """True if machines have separate disks: at least one of them cannot see the first machine's run directory."""

    def variables(self) -> dict[str, str]:
        """Return the environment variable that hands it to a process."""
        return {_PART_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def take(cls) -> Self | None:
        """Return the part that this process was given, and remove it from the environment; None without one."""
        text = os.environ.pop(_PART_VARIABLE, None)
        return None if text is None else cls(**json.loads(text))

    def worker_variables(self) -> dict[str, str]:
        """Return the environment variables of its workers, which the libraries for collectives read."""
        variables = {
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            BIND_VARIABLE: "1",
        }
        if self.own_disks:
            variables[OWN_DISKS_VARIABLE] = "1"
        if self.interface is not None:
            formats = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
            chosen = {name: text.format(self.interface) for name, text in formats.items()}
            variables.update({name: value for name, value in chosen.items() if name not in os.environ})
        return variables


def machines_from_environment(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the number of machines, or the range, that the environment or a Slurm step names; None for one machine.

    Within a mere allocation of Slurm (`salloc`) no other process was started, so none is waited for.
    """
    environment = os.environ if environment is None else environment
    if "LOCAL_RANK" in environment:  # torchrun has started this process as a worker
        return None
    if environment.get(MACHINES):
        return environment[MACHINES]
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_STEP_NUM_NODES", "1")
    return tasks if "SLURM_PROCID" in environment and tasks.isdecimal() and int(tasks) > 1 else None


def machine_number(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the number of this machine as the user or a scheduler gives it, and the variable that has it."""
    for name in (NODE, *NODE_NUMBERS):
        if name in environment and (name == NODE or environment[name]):
            return environment[name], name
    return None


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


def is_rescheduled() -> bool:
    """Return whether a scheduler that starts a job again after exit code 75 has started this process."""
    return any(name in os.environ for name in _SCHEDULERS)


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

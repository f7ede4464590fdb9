"""The protocol of launchers, and the table of those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from headway.clouds.launchers.job import Job
from headway.core.errors import ConfigError
from headway.core.functions import find_target

#: Each name of `--on`, and where its launcher is.
LAUNCHERS = {
    "slurm": "headway.clouds.launchers.slurm:LAUNCHER",
    "kubernetes": "headway.clouds.launchers.kubernetes:LAUNCHER",
    "jobset": "headway.clouds.launchers.jobset:LAUNCHER",
    "trainjob": "headway.clouds.launchers.trainjob:LAUNCHER",
    "pytorchjob": "headway.clouds.launchers.pytorchjob:LAUNCHER",
    "rayjob": "headway.clouds.launchers.rayjob:LAUNCHER",
    "ray": "headway.clouds.launchers.ray_job:LAUNCHER",
    "sky": "headway.clouds.launchers.sky:LAUNCHER",
    "metaflow": "headway.clouds.launchers.metaflow:LAUNCHER",
}

#: A job's state in one word, whatever its engine calls it.
State = Literal["waiting", "running", "stopping", "finished", "failed", "cancelled", "gone", "unknown"]
#: A job in one of these still has, or waits for, machines.
ALIVE: tuple[State, ...] = ("waiting", "running", "stopping")
#: No machine has a job in one of these. `unknown` is in neither: the job may be alive.
OVER: tuple[State, ...] = ("finished", "failed", "cancelled", "gone")


@dataclass(frozen=True)
class Handle:
    """What finds a launched job again; `launch.json` in the run directory."""

    target: str
    """Name of the launcher."""
    id: str
    """The engine's name for the job."""
    machines: str
    """Machines, as `2` or `2:4`."""
    grace_seconds: int
    """Time that a stop has to save."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the launcher needs to find it: a context, a namespace."""
    launched: float = 0.0
    """When, in Unix seconds."""


@dataclass(frozen=True)
class JobState:
    """What an engine says about a job."""

    state: State
    engine: str
    """The engine's own words."""
    machines: int | None = None
    """Machines that run it now; None if unknown."""


class Launcher(Protocol):
    """A way to start a run on a cluster: `problems` and `files` are pure, the others drive the engine's program."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        ...

    def files(self, job: Job) -> Mapping[str, str | bytes]:
        """Return the files of the launch by name: texts that describe the job, and what travels with it.

        Raises:
            ConfigError: one cannot be made here.
        """
        ...

    def check(self, job: Job) -> None:
        """Ask the engine whether it can take the job; start nothing.

        Raises:
            ConfigError: it cannot, or it does not answer.
        """
        ...

    def submit(self, job: Job, folder: Path) -> Handle:
        """Start the job of the files in a folder.

        Raises:
            ConfigError: the engine refuses it.
        """
        ...

    def status(self, handle: Handle) -> JobState:
        """Ask the engine how a job is."""
        ...

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print what a job has printed, and return the exit code of the program that does it."""
        ...

    def cancel(self, handle: Handle) -> None:
        """Have the engine signal the job's machines, wait for their saves, and remove the job.

        Raises:
            ConfigError: the engine refuses it.
        """
        ...


def find_launcher(name: str) -> Launcher:
    """Return a launcher by its name, or one of your own as `package.module:NAME`.

    Raises:
        ConfigError: there is none of that name.
    """
    return cast(Launcher, find_target(LAUNCHERS, name, f"there is no launcher '{name}'"))

"""A run as launchers see it: the config that travels, the machines, and the command that each of them runs.

A bench suite is launched in the same way: its text travels in the place of the config.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import Config, ParallelConfig, dump_config, load_config
from headway.config.loading.load import given_value, override
from headway.core.errors import ConfigError
from headway.core.format import counted, format_seconds
from headway.core.own_code import carried_sources
from headway.core.storage import scheme_of
from headway.run.directory.run_directory import LAUNCH_FOLDER

#: Names in clusters (RFC 1123).
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
DNS_LABEL_LENGTH = 63
_SMOKE_SUFFIX = "-smoke"
_LEAST_GRACE_SECONDS = 120
#: A stop waits for the step under way, perhaps for an earlier save, and then for its own.
_SAVES_IN_A_STOP = 3.0

#: What a smoke job changes: one GPU and a small model suffice to try the image, the driver, mounts and secrets.
SMOKE = (
    "model.preset=4m", "train.steps=10", "train.global_batch=8", "train.micro_batch=1", "train.batch_ramp=[]",
    "train.lanes=auto", "parallel.workers=1", "parallel.strategy=auto", "parallel.tensor=1", "parallel.context=1",
    "parallel.pipeline=1", "parallel.expert=1",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A run that a cluster is to start."""

    config: Config
    """The resolved config; `parallel.workers` counts those of one machine."""
    machines: int = 1
    min_machines: int | None = None
    """Fewest machines with which the run continues."""
    save_seconds: float | None = None
    """How long the last save of the run took, if it has been saved before."""

    out: Path | None = None
    """Folder that gets the files; one in the run directory when not given."""
    suite: str | None = None
    """A suite of `headway bench` in YAML, which is measured instead of training; `config` says where and how."""
    suite_launcher: str = ""
    """`--launcher` with which each of several machines runs the suite: the first one leads."""
    parts: int = 1
    """Jobs that share the cells of the suite, where the engine has arrays of jobs."""
    smoke: bool = False
    """It only tries what a run needs, and nothing that it saves is used."""
    held: bool = False
    """It is stopped, and launched again, as prices rise and fall."""

    @property
    def folder(self) -> Path:
        """Folder that holds the files of the launch."""
        return self.out or self.directory / LAUNCH_FOLDER

    @property
    def directory(self) -> Path:
        """The run directory as this machine has it, for the handle; in `runs` where that of the run is elsewhere."""
        own = self.config.run_directory
        there = next(place for place in (own, *own.absolute().parents) if place.exists())
        return own if os.access(there, os.W_OK) else Path("runs") / self.name

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.name

    @property
    def gpus(self) -> int:
        """GPUs of each machine."""
        if self.config.launch.gpus_per_machine is not None:
            return self.config.launch.gpus_per_machine
        return 0 if self.config.train.device == "cpu" else self.config.parallel.workers

    @property
    def machine_range(self) -> str:
        """Machines as the node process takes them: `2`, or `2:4`."""
        return str(self.machines) if self.min_machines is None else f"{self.min_machines}:{self.machines}"

    @property
    def grace_seconds(self) -> int:
        """Time between the signal to stop and the kill."""
        if self.config.launch.grace_seconds is not None:
            return self.config.launch.grace_seconds
        return max(_LEAST_GRACE_SECONDS, round(_SAVES_IN_A_STOP * (self.save_seconds or 0)))

    def config_text(self) -> str:
        """Return the config in YAML, or the suite, as the machines read it; with the sources of a task of its own."""
        return dump_config(with_sources(self.config)) if self.suite is None else self.suite

    def command(self, config: str, suite_launcher: str | None = None) -> list[str]:
        """Return what each machine runs.

        Args:
            config: The file that has the text of `config_text` there.
            suite_launcher: Takes the place of the job's own.
        """
        if self.suite is None:
            return ["headway", "train", config]
        # Results are also in the log, from which `headway bench collect` reads them.
        results = str(self.config.run_directory / "results")
        command = ["headway", "bench", "run", config, "--output", results, "--print-results"]
        return command if self.machines == 1 else [*command, "--launcher", suite_launcher or self.suite_launcher]

    def in_container(self, path: Path | str) -> str:
        """Return a path of the config in a container, where relative ones begin in `launch.workdir`."""
        return posixpath.normpath(posixpath.join(self.config.launch.workdir, str(path)))

    def problems(self) -> Iterator[ConfigError]:
        """Yield what no engine can mend."""
        if self.save_seconds is not None and self.grace_seconds < self.save_seconds:
            yield ConfigError(
                f"launch.grace_seconds is {self.grace_seconds}, but the last save took"
                f" {format_seconds(self.save_seconds)}: a stop would lose it",
                where="launch.grace_seconds",
                fix=f"launch.grace_seconds={round(_SAVES_IN_A_STOP * self.save_seconds)}, or leave it out",
            )
        if self.gpus and self.gpus < self.config.parallel.workers:
            yield ConfigError(
                f"a machine has {counted(self.gpus, 'GPU')} and {self.config.parallel.workers} workers",
                where="launch.gpus_per_machine, parallel.workers",
                fix=f"launch.gpus_per_machine={self.config.parallel.workers}, or fewer workers",
            )

    @property
    def has_object_tier(self) -> bool:
        """Whether its checkpoints are copied to object storage, where other machines find them."""
        remote = self.config.checkpoint.remote
        return remote is not None and scheme_of(remote.url) not in (None, "file", "local")


def with_sources(config: Config) -> Config:
    """Return a config that carries the sources of its task to machines that lack them.

    Raises:
        ConfigError: they are not here.
    """
    task = config.task
    if task is None or task.files:
        return config
    files = carried_sources(task.function.partition(":")[0], "task.function")
    return config.model_copy(update={"task": task.model_copy(update={"files": files})})


def smoke_job(config: Config, out: Path | None = None) -> Job:
    """Return the job of one GPU that tries what a run needs."""
    changed = override(config, [*SMOKE, f"name={config.name}{_SMOKE_SUFFIX}"])
    gpus = 0 if config.train.device == "cpu" or config.launch.gpus_per_machine == 0 else 1
    launch = config.launch.model_copy(update={"gpus_per_machine": gpus})
    return Job(changed.model_copy(update={"launch": launch}), out=out, smoke=True)


def load_job(config: str | Path, overrides: Sequence[str] = (), machines: str = "1") -> Job:
    """Load a config for all machines together, as the mesh spans them, and return the job of it.

    Args:
        config: The config, of which `parallel.workers` counts the workers of one machine.
        overrides: As `key=value`.
        machines: Number of machines, or a range of them.

    Raises:
        ConfigError: the config or the number of machines is wrong.
    """
    fewest, most = parse_machines(machines)
    if most == 1:
        return Job(load_config(config, overrides), most, fewest)
    given = given_value(config, overrides, "parallel.workers")
    each = ParallelConfig.model_validate({} if given is None else {"workers": given})
    whole = load_config(config, [*overrides, f"parallel.workers={each.workers * most}"])
    parallel = whole.parallel.model_copy(update={"workers": each.workers, "min_workers": each.min_workers})
    return Job(whole.model_copy(update={"parallel": parallel}), most, fewest)


def parse_machines(text: str) -> tuple[int | None, int]:
    """Parse a number of machines, or a range of them: the fewest (None without a range) and the most.

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"(?:([1-9][0-9]{0,5}):)?([1-9][0-9]{0,5})", text.strip())
    fewest, most = (int(found[1]) if found[1] else None, int(found[2])) if found else (None, 0)
    if found is None or (fewest or 1) > most:
        raise ConfigError(f"'{text}' is no number of machines", where="--machines", fix="--machines 2, or 2:4")
    return fewest, most


def plain_name(job: Job, most: int, *, letter_first: bool = False) -> str:
    """Return a name for a run that is a DNS label, as much as possible like its own.

    Args:
        job: The run; of one that only tries, the name before its suffix is meant.
        most: Number of characters that the name of the job may have.
        letter_first: It must begin with a letter.
    """
    name = job.name
    if job.smoke:
        name = name.removesuffix(_SMOKE_SUFFIX)
        most -= len(_SMOKE_SUFFIX)
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if letter_first and not plain[:1].isalpha():
        plain = f"run-{plain}"
    return plain[:most].strip("-") or "run"


def survival_problems(job: Job, shared: bool, fix: str) -> Iterator[ConfigError]:
    """Yield a problem if what a run saves is lost with its machine.

    Args:
        job: The run.
        shared: The run directory lies where other machines find it.
        fix: How to have it so with this engine.
    """
    if job.suite is not None or job.smoke:
        return  # nothing that it saves is used, and the results of a suite are also in the log
    if not shared and not job.has_object_tier:
        yield ConfigError(
            f"{job.config.run_directory} is on no shared volume and there is no remote tier, so a machine that is lost"
            " takes the checkpoints with it",
            where="runs, checkpoint.remote",
            fix=f"{fix}, or give checkpoint.remote.url",
        )

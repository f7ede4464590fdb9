"""A Ray cluster that exists: the run as a job of it (`ray job submit`), which places machines (`launchers.ray`)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import headway
from headway.clouds.launchers.job import Job, survival_problems
from headway.clouds.launchers.launcher import Handle, JobState, State
from headway.clouds.launchers.patches import merge
from headway.clouds.programs import ask_program, show_program, try_program
from headway.config.sections.launch import LaunchConfig
from headway.core.errors import ConfigError
from headway.core.process.waiting import wait_until

CONFIG = "config.yaml"
ENVIRONMENT = "runtime-env.json"
COMMAND = "entrypoint.json"
_STATES: dict[str, State] = {
    "PENDING": "waiting", "RUNNING": "running", "SUCCEEDED": "finished", "FAILED": "failed", "STOPPED": "cancelled",
}  # fmt: skip


def ray_command(job: Job, config: str) -> list[str]:
    """Return the command of a job of Ray: Ray Train places the machines of a training, plain tasks those of a bench."""
    if job.suite is not None and job.machines > 1:
        ray = job.config.launch.ray
        words = ["--machines", str(job.machines), "--gpus", str(job.gpus), "--failures", str(ray.max_failures)]
        words += ["--wait-seconds", f"{ray.wait_seconds:g}", "--", *job.command(config)[1:]]
        return ["python", "-m", "headway.clouds.launchers.ray_machines", *words]
    if job.suite is not None:
        return job.command(config)
    return ["python", "-m", "headway.clouds.launchers.ray", config, "--machines", job.machine_range]


class RayJobLauncher:
    """A launcher for jobs of a Ray cluster."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from job.problems()
        # Ray runs the job in a copy of the launch's folder, which it removes.
        shared = job.config.run_directory.is_absolute()
        yield from survival_problems(job, shared, "name a folder that all machines share: runs=/mnt/shared/runs")

    def files(self, job: Job) -> dict[str, str]:
        """Return the config, the runtime environment and the command of the job."""
        # Ray copies the folder of the launch to the machines; your own code comes with `working_dir` in the patch.
        environment = runtime_environment(job.config.launch)
        words = ray_command(job, CONFIG)
        texts = {ENVIRONMENT: environment, COMMAND: words}
        return {
            CONFIG: job.config_text(),
            **{name: f"{json.dumps(value, indent=2)}\n" for name, value in texts.items()},
        }

    def check(self, job: Job) -> None:
        """Ask the cluster whether it answers.

        Raises:
            ConfigError: it does not.
        """
        ask_program(["ray", "job", "list", *_address(job.config.launch.ray.address)])

    def submit(self, job: Job, folder: Path) -> Handle:
        """Submit the job with the folder as its working directory.

        Raises:
            ConfigError: Ray refuses it.
        """
        address = job.config.launch.ray.address
        name = f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        words = ["ray", "job", "submit", *_address(address), "--no-wait", "--submission-id", name]
        environment = ["--working-dir", str(folder), "--runtime-env-json", (folder / ENVIRONMENT).read_text()]
        if job.suite is not None and job.machines == 1 and job.gpus:
            words += ["--entrypoint-num-gpus", str(job.gpus)]
        ask_program([*words, *environment, "--", *json.loads((folder / COMMAND).read_text())], seconds=600)
        return Handle("ray", name, job.machine_range, job.grace_seconds, {"address": address}, time.time())

    def status(self, handle: Handle) -> JobState:
        """Ask the cluster how the job is."""
        done = try_program(["ray", "job", "status", *_address(handle.details.get("address")), handle.id])
        said = done.stdout + done.stderr
        word = _parse_status(said, handle.id)
        if not word and "does not exist" in said:
            return JobState("gone", "Ray has no such job")
        return JobState(_STATES.get(word, "unknown"), word or said.strip()[-200:] or "no answer")

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print the job's output."""
        words = ["ray", "job", "logs", *_address(handle.details.get("address")), *(["--follow"] * follow), handle.id]
        return show_program(words)

    def cancel(self, handle: Handle) -> None:
        """Stop the job: Ray signals it, and its node processes save.

        Raises:
            ConfigError: Ray refuses it.
        """
        ask_program(["ray", "job", "stop", *_address(handle.details.get("address")), "--no-wait", handle.id])
        wait_until(lambda: self.status(handle).state not in ("waiting", "running"), handle.grace_seconds, 1.0)


def _parse_status(said: str, job: str) -> str:
    """Return the status of a job from what `ray job status` prints; its message may quote the job's own log."""
    name = re.escape(f"'{job}'")
    found = re.search(
        rf"Status for job {name}: (?:JobStatus\.)?(\w+)|Job {name} (?:was )?(succeeded|failed|stopped)", said
    )
    return "" if found is None else str(found[1] or found[2]).upper()


def runtime_environment(launch: LaunchConfig) -> dict[str, Any]:
    """Return what Ray sets up on its machines before our code runs there."""
    environment: dict[str, Any] = {
        "env_vars": dict(launch.environment),
        **({"pip": list(launch.ray.packages)} if launch.ray.packages else {}),
        **({"py_modules": [str(Path(headway.__file__).parent)]} if launch.ray.ship else {}),
    }
    merged: dict[str, Any] = merge(environment, dict(launch.ray.patch))
    return merged


def _address(address: str | None) -> list[str]:
    return [] if address is None else ["--address", address]


LAUNCHER = RayJobLauncher()

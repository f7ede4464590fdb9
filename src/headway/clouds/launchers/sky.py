"""SkyPilot: a task for machines of any cloud, or for pools of your own, as a managed job of `sky jobs`."""

from __future__ import annotations

import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.clouds.launchers.job import DNS_LABEL, Job, plain_name, survival_problems
from headway.clouds.launchers.launcher import Handle, JobState, State
from headway.clouds.launchers.patches import merge
from headway.clouds.launchers.wheel import PLACE, shipped, with_install
from headway.clouds.programs import ask_json, ask_program, show_program
from headway.core.coordination.launch_variables import LEAD, MACHINES, NODE, SECRET
from headway.core.errors import ConfigError, Preempted
from headway.core.files.atomic import write_text
from headway.core.storage import scheme_of

#: How long a run's name may be, since it is unknown what SkyPilot appends.
_NAME_LENGTH = 48
CONFIG = "config.yaml"
TASK = "task.yaml"
_FOLDER = "headway"
_REMOTE_CONFIG = f"~/{_FOLDER}/config.yaml"
_STATES: dict[str, State] = {
    "PENDING": "waiting", "SUBMITTED": "waiting", "DEPRECATED_SUBMITTED": "waiting", "STARTING": "waiting",
    "RUNNING": "running", "RECOVERING": "waiting", "CANCELLING": "stopping",
    "SUCCEEDED": "finished", "CANCELLED": "cancelled",
}  # fmt: skip

_MACHINES = f"""\
export {MACHINES}={{machines}}
export {NODE}=$SKYPILOT_NODE_RANK
export {LEAD}=$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{{port}}
"""


class SkyLauncher:
    """A launcher for SkyPilot."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from job.problems()
        if len(job.name) > _NAME_LENGTH or not DNS_LABEL.fullmatch(job.name):
            yield ConfigError(
                f"the name '{job.name}' is no DNS label: at most {_NAME_LENGTH} lower-case letters, digits and dashes",
                where="name",
                fix=f"name={plain_name(job, _NAME_LENGTH)}",
            )
        # Machines of clouds share no disk, and a spot machine takes its own with it.
        yield from survival_problems(job, shared=False, fix="SkyPilot's machines share none")
        named = job.config.launch.package
        if named is not None and named.endswith(".whl") and scheme_of(named) is None and not Path(named).is_file():
            yield ConfigError(
                f"there is no wheel {named} here",
                where="launch.package",
                fix="name a file that exists; without the key a wheel is made of the Headway that launches",
            )
        reads_sources = job.config.task is None and job.suite is None and job.config.data.remote is None
        if job.machines > 1 and reads_sources:
            local = [source.path for source in job.config.data.sources if scheme_of(source.path) is None]
            if local:
                yield ConfigError(
                    f"the machines cannot see {local[0]}",
                    where="data.remote",
                    fix="copy the token store to object storage and name it: data.remote=s3://bucket/store",
                )

    def files(self, job: Job) -> dict[str, str | bytes]:
        """Return the task, the config, and the wheel that the machines install.

        Raises:
            ConfigError: as `build_wheel`.
        """
        import yaml

        installs = any(PLACE in line for line in job.config.launch.sky.setup)
        wheel = shipped(job.config) if installs else None
        task = str(yaml.safe_dump(_task(job, wheel and wheel[0]), sort_keys=False, width=120))
        return {TASK: task, CONFIG: job.config_text(), **({} if wheel is None else dict([wheel]))}

    def check(self, job: Job) -> None:
        """Ask SkyPilot whether it has access to a cloud.

        Raises:
            ConfigError: it has none.
        """
        ask_program(["sky", "check"], seconds=300)

    def submit(self, job: Job, folder: Path) -> Handle:
        """Hand the task to SkyPilot's jobs controller.

        Raises:
            ConfigError: SkyPilot refuses it.
        """
        words = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name]
        with tempfile.TemporaryDirectory() as private:
            if job.machines > 1:  # the secret travels in a file that only this user may read
                file = Path(private) / "secret.env"
                write_text(file, f"{SECRET}={secrets.token_hex(32)}\n", private=True)
                words += ["--secret-file", str(file)]
            said = ask_program([*words, str(folder / TASK)], seconds=1800)
        number = re.search(r"[Jj]ob(?: submitted, ID:| ID:?) *(\d+)", said)
        if number is None:
            raise ConfigError(
                "SkyPilot did not say the number of the job", where="sky jobs launch", fix="sky jobs queue shows it"
            )
        details = {"name": job.name}
        return Handle("sky", number[1], job.machine_range, job.grace_seconds, details, time.time())

    def status(self, handle: Handle) -> JobState:
        """Ask the jobs controller."""
        rows = ask_json(["sky", "jobs", "queue", "--output", "json"])
        rows = rows if isinstance(rows, list) else rows.get("jobs", [])
        row = next((row for row in rows if str(row.get("job_id")) == handle.id), None)
        if row is None:
            return JobState("gone", "SkyPilot has no such job")
        word = str(row.get("status", "")).rpartition(".")[2]
        state = _STATES.get(word, "failed" if word.startswith("FAILED") else "unknown")
        return JobState(state, word or "no state yet")

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print the job's output."""
        return show_program(["sky", "jobs", "logs", *([] if follow else ["--no-follow"]), handle.id])

    def cancel(self, handle: Handle) -> None:
        """Cancel the job, which signals the machines and removes them.

        Raises:
            ConfigError: SkyPilot refuses it.
        """
        ask_program(["sky", "jobs", "cancel", "--yes", handle.id], seconds=handle.grace_seconds + 600)


def _task(job: Job, wheel: str | None) -> dict[str, Any]:
    launch = job.config.launch
    sky = launch.sky
    resources = {
        "infra": sky.infra,
        "accelerators": sky.accelerators
        or (f"{launch.accelerator}:{job.gpus}" if launch.accelerator and job.gpus and not sky.instance_type else None),
        "instance_type": sky.instance_type,
        "image_id": None if launch.image is None else f"docker:{launch.image}",
        "use_spot": sky.spot,
        # 75 asks to be started again; other codes are errors, of which so many are forgiven.
        "job_recovery": {"max_restarts_on_errors": sky.max_restarts, "recover_on_exit_codes": [Preempted.exit_code]},
    }
    machines = _MACHINES.format(machines=job.machine_range, port=launch.port) if job.machines > 1 else ""
    # Without quotes around the config: the shell knows where its home is.
    command = " ".join(_REMOTE_CONFIG if word == CONFIG else shlex.quote(word) for word in job.command(CONFIG))
    mounted = {CONFIG: _REMOTE_CONFIG, **({} if wheel is None else {wheel: f"~/{_FOLDER}/{wheel}"})}
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.machines,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": dict(launch.environment),
        "secrets": {SECRET: None} if job.machines > 1 else {},
        "file_mounts": {there: str((job.folder / name).absolute()) for name, there in mounted.items()},
        "workdir": sky.workdir,
        "setup": "\n".join(with_install(sky.setup, job.config, f"$HOME/{_FOLDER}")),
        # `exec`: the node process itself gets the signals.
        "run": f"{machines}exec {command}\n",
    }
    merged: dict[str, Any] = merge({name: value for name, value in task.items() if value}, dict(sky.patch))
    return merged


LAUNCHER = SkyLauncher()

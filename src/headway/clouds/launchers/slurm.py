"""Slurm: a batch script whose step starts the node process on every machine, driven by `sbatch` and `squeue`.

The script queues itself again when the run says so (exit code 75), or when Slurm has preempted it before Python could
answer (143), but never after `scancel`.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.launcher import Handle, JobState, State
from headway.clouds.launchers.patches import merge
from headway.clouds.programs import ask_program, last_words, show_program, try_program
from headway.config.sections.launch import SlurmConfig
from headway.core.coordination.launch_variables import CODE_FILE, MACHINES, SECRET_FILE
from headway.core.errors import ConfigError
from headway.core.process.waiting import wait_until
from headway.run.session.attempt import RunOptions
from headway.run.session.preparation import why_prepare

CONFIG = "config.yaml"
SCRIPT = "job.sh"
PREPARE = "prepare.sh"
#: The file that says that a person has ended the job, so that the script does not queue it again.
CANCELLED = "cancelled"
#: The file in which the lead leaves its exit code. That of the step is the highest one of all machines.
CODE = "code"
_LOG = "slurm-%j.log"
#: Starts the workers of a cell of a suite, as a step: only the first machine runs the suite.
_SUITE_LAUNCHER = "srun --nodes={machines} --ntasks={machines} --ntasks-per-node=1 --kill-on-bad-exit=1"
#: Slurm's own margin when it enforces a limit.
_KILL_SECONDS = 30

_STATES: dict[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_HOLD": "waiting",
    "REQUEUE_FED": "waiting", "RESV_DEL_HOLD": "waiting", "SPECIAL_EXIT": "waiting",
    "RUNNING": "running", "SUSPENDED": "waiting", "RESIZING": "running", "SIGNALING": "running",
    "STAGE_OUT": "stopping", "STOPPED": "waiting", "COMPLETING": "stopping",
    "COMPLETED": "finished", "CANCELLED": "cancelled", "REVOKED": "cancelled",
    "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed", "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed",
    "DEADLINE": "failed", "PREEMPTED": "waiting",
}  # fmt: skip

_HEAD = """\
#!/bin/bash
{options}
cd {folder} || exit 2
# A step has one processor for each task unless it asks for more, whatever its job has asked for.
[ -z "${{SLURM_CPUS_PER_TASK:-}}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
{setup}"""

_SCRIPT = """\
{head}
{machines}
# Bash must outlive the signal that stops the run: it decides what follows.
trap : TERM USR1
# The step gets Slurm's signals; `wait` returns early when bash gets one too. The last call gives the step's exit code,
# which bash remembers, also if a signal came at the very end, or the step ended before the first call.
{srun} {command} &
step=$!
while wait $step; kill -0 $step 2>/dev/null; do :; done
code=0
wait $step || code=$?
{lead_code}
# While bash runs, a job that nobody has ended is RUNNING. After `scancel` it is COMPLETING, in which `scontrol requeue`
# would bring it back; so would it be after a preemption, of which there is a time, or of its limit.
about=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null; squeue --noheader --jobs "$SLURM_JOB_ID" --format=%T 2>/dev/null
    sacct --noheader --allocations --jobs "$SLURM_JOB_ID" --format=State%40 2>/dev/null)
says() {{ grep --quiet --extended-regexp "$1" <<< "$about"; }}
preempted=no
says 'PreemptTime=[0-9]|PREEMPTED' && preempted=yes
over=no
[ "$(date +%s)" -lt "${{SLURM_JOB_END_TIME:-9999999999}}" ] || over=yes
again=no
case $code in
    75) if says 'JobState=RUNNING' || [ $preempted$over != nono ]; then again=yes; fi ;;
    143) again=$preempted ;;
esac
# `headway launch cancel` leaves this file; 7 is the code of a run that was cancelled.
[ ! -e {cancelled} ] || {{ again=no; code=7; }}
[ $again = no ] || scontrol requeue "$SLURM_JOB_ID" || true
exit $code
"""

#: Variables of a run on several machines. A step tells each node process its number, and where the first one leads, at
#: a port of its own: jobs may share a machine.
_MACHINES = f"""\
export {MACHINES}={{machines}}
export {SECRET_FILE}={{secret}}
export {CODE_FILE}={{code}}
rm -f {{code}}
[ -e {{secret}} ] || (umask 077 && head --bytes=32 /dev/urandom | base64 > {{secret}})
"""


_LEAD_CODE = """\
# The step gives the highest code of all machines. That of the lead is the run's: it may have finished without a machine
# that was killed, or have asked for all of them again.
if grep --quiet --line-regexp --extended-regexp '[0-9]+' {code} 2>/dev/null; then code=$(cat {code}); fi
"""


class SlurmLauncher:
    """A launcher for Slurm."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from job.problems()
        if job.suite is not None and job.machines > 1 and job.config.launch.slurm.container is not None:
            yield ConfigError(
                "a suite that compares numbers of machines starts its steps from outside of a container",
                where="launch.slurm.container",
                fix="install Headway on the machines, or machines=1",
            )
        limit = job.config.launch.slurm.time
        if limit is not None and 0 < _seconds(limit) <= job.grace_seconds:  # 0 is no limit
            yield ConfigError(
                f"the time limit {limit} is no longer than the {job.grace_seconds} s that a stop has",
                where="launch.slurm.time, launch.grace_seconds",
                fix="launch.slurm.time=24:00:00",
            )

    def files(self, job: Job) -> dict[str, str]:
        """Return the script, the config, and the script that prepares the data where they have to be."""
        files = {CONFIG: job.config_text(), SCRIPT: _script(job)}
        if job.suite is None and job.config.task is None and why_prepare(job.config, RunOptions()) is not None:
            files[PREPARE] = _prepare_script(job)
        return files

    def check(self, job: Job) -> None:
        """Ask Slurm for the partition, and whether the job would be taken.

        Raises:
            ConfigError: there is no such partition, or Slurm refuses the options.
        """
        partition = job.config.launch.slurm.partition
        known = sorted({name.rstrip("*") for name in ask_program(["sinfo", "--noheader", "--format=%P"]).split()})
        unknown = [name for name in (partition or "").split(",") if name and name not in known]
        if unknown:
            raise ConfigError(
                f"Slurm has no partition '{unknown[0]}'",
                where="launch.slurm.partition",
                fix=f"one of: {', '.join(known)}",
            )
        tried = try_program(["sbatch", "--test-only", *_words(batch_options(job, Path())), "--wrap=true"])
        if tried.returncode:
            raise ConfigError(
                f"Slurm would refuse the job: {last_words(tried)}",
                where="launch.slurm, --machines",
                fix="fewer machines or GPUs, or other options in launch.slurm",
            )

    def submit(self, job: Job, folder: Path) -> Handle:
        """Queue the job, behind the one that prepares the data if there is one.

        Raises:
            ConfigError: Slurm refuses it.
        """
        folder = folder.absolute()
        (folder / CANCELLED).unlink(missing_ok=True)
        after: list[str] = []
        details: dict[str, Any] = {"folder": str(folder)}
        if job.parts > 1:
            details["parts"] = job.parts
        if (folder / PREPARE).exists():
            details["prepare"] = submit_script(folder / PREPARE)
            after = [f"--dependency=afterok:{details['prepare']}", "--kill-on-invalid-dep=yes"]
        number = submit_script(folder / SCRIPT, *after)
        return Handle("slurm", number, job.machine_range, job.grace_seconds, details, time.time())

    def status(self, handle: Handle) -> JobState:
        """Ask `squeue`, and `sacct` once the job has left the queue."""
        asked = ["squeue", "--noheader", "--jobs", handle.id, "--states=all", "--format=%T|%D|%r"]
        answer = try_program(asked)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            return JobState("unknown", answer.stderr.strip()[-200:] or "squeue does not answer")
        lines = answer.stdout.strip().splitlines()
        if lines:
            word, machines, reason = _most_urgent(lines, "|").split("|", 2)
            state = _STATES.get(word, "unknown")
            words = word if reason in ("None", "") else f"{word} ({reason})"
            return JobState(state, words, int(machines) if state == "running" and machines.isdecimal() else None)
        known = try_program(["sacct", "--noheader", "--allocations", "--jobs", handle.id, "--format=State%40"])
        found = [line.strip() for line in known.stdout.strip().splitlines()]
        words = _most_urgent(found, " ") if found else ""
        return JobState(_STATES.get(words.split(" ")[0], "gone"), words or "Slurm has forgotten it")

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print the job's log."""
        folder = Path(handle.details["folder"])
        logs = [str(folder / _LOG.replace("%j", handle.id))]
        if handle.details.get("parts", 1) > 1:
            logs = sorted(map(str, folder.glob(_LOG.replace("%j", "*")))) or logs
        return show_program(["tail", "--lines=+1", *(["--follow=name", "--retry"] * follow), *logs])

    def cancel(self, handle: Handle) -> None:
        """Signal the machines, wait for their saves, then remove the job.

        Raises:
            ConfigError: Slurm refuses it.
        """
        folder = Path(handle.details["folder"])
        if folder.is_dir():
            (folder / CANCELLED).touch()
        if "prepare" in handle.details:
            try_program(["scancel", "--quiet", str(handle.details["prepare"])])
        if self.status(handle).state == "running":
            # To the step, not to the script: that one waits for the step.
            try_program(["scancel", "--quiet", "--signal=TERM", handle.id])
            wait_until(lambda: self.status(handle).state != "running", handle.grace_seconds, 1.0)
        ask_program(["scancel", "--quiet", handle.id])


def _most_urgent(lines: Sequence[str], separator: str) -> str:
    """Return, of the parts of an array, the line of one that runs or waits, else of one that failed."""
    states = [_STATES.get(line.partition(separator)[0], "unknown") for line in lines]
    order = ("running", "stopping", "waiting", "failed")
    return lines[next((states.index(one) for one in order if one in states), 0)]


def batch_options(job: Job, folder: Path) -> dict[str, Any]:
    """Return the options of sbatch."""
    slurm = job.config.launch.slurm
    options: dict[str, Any] = {
        "job-name": job.name,
        "nodes": job.machines if job.min_machines is None else f"{job.min_machines}-{job.machines}",
        "ntasks-per-node": 1,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "time": slurm.time,
        "gres": slurm.gres or (f"gpu:{job.gpus}" if job.gpus else None),
        "cpus-per-task": _processors(job),
        "array": f"1-{job.parts}" if job.parts > 1 else None,
        "requeue": True,
        # To the step of the run, so long before the time limit or a preemption.
        "signal": f"USR1@{job.grace_seconds + _KILL_SECONDS}",
        "output": log_pattern(folder, _LOG),
        "open-mode": "append",
    }
    merged: dict[str, Any] = merge(options, dict(slurm.patch))
    return {name: value for name, value in merged.items() if value is not None and value is not False}


def _processors(job: Job) -> int | None:
    """Return the processors of each machine: those of its workers where they train on processors.

    A task gets one unless it asks for more. With GPUs that is left to the cluster, which may grant a number for each.
    """
    parallel = job.config.parallel
    threads = 1 if parallel.threads == "auto" else parallel.threads
    processors = parallel.workers * threads
    return None if job.gpus or processors == 1 else processors


def log_pattern(folder: Path, name: str) -> str:
    """Return a pattern for the name of a log, in which Slurm replaces no part of the folder's name."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def _words(options: dict[str, Any]) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def prepare_options(job: Job, folder: Path) -> dict[str, Any]:
    """Return the options of sbatch for preparing data: one task on a machine without GPUs, and no signal to save."""
    left_out = {"gres", "signal"}
    if "cpus-per-task" not in job.config.launch.slurm.patch:
        left_out.add("cpus-per-task")
    options = {name: value for name, value in batch_options(job, folder).items() if name not in left_out}
    return options | {"job-name": f"{job.name}-prepare", "nodes": 1, "ntasks-per-node": 1}


def container_options(slurm: SlurmConfig) -> list[str]:
    """Return the options of srun for the container, if there is one; it sees the working directory."""
    if slurm.container is None:
        return []
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *slurm.container_mounts])
    return [f"--container-image={slurm.container}", f"--container-mounts={mounts}"]


def submit_script(script: Path, *options: str) -> str:
    """Queue a batch script and return the number of its job.

    Raises:
        ConfigError: Slurm refuses it.
    """
    return ask_program(["sbatch", "--parsable", *options, str(script)]).strip().partition(";")[0]


def script_head(job: Job, options: dict[str, Any]) -> str:
    """Return the beginning of a batch script: its options, working directory, variables and setup."""
    launch = job.config.launch
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    setup = "\n".join([*exports, *launch.slurm.setup])
    lines = "\n".join(f"#SBATCH {shlex.quote(word)}" for word in _words(options))
    return _HEAD.format(options=lines, folder=shlex.quote(str(Path.cwd())), setup=setup).rstrip()


def _script(job: Job) -> str:
    folder = job.folder.absolute()
    # A machine that dies must not end the others: they save, and say what is to follow.
    srun = ["srun", "--kill-on-bad-exit=0", "--wait=0", *container_options(job.config.launch.slurm)]
    part = f' --part "$SLURM_ARRAY_TASK_ID/{job.parts}"' if job.parts > 1 else ""
    machines = ""
    lead_code = ""
    if job.suite is not None and job.machines > 1:
        srun = []  # it starts a step for each cell
    elif job.machines > 1:
        secret, code = (shlex.quote(str(folder / name)) for name in ("secret", CODE))
        machines = _MACHINES.format(machines=job.machine_range, secret=secret, code=code)
        lead_code = _LEAD_CODE.format(code=code)
    return _SCRIPT.format(
        head=script_head(job, batch_options(job, folder)),
        machines=machines.rstrip(),
        lead_code=lead_code,
        srun=shlex.join(srun),
        command=f"{shlex.join(job.command(str(folder / CONFIG), _SUITE_LAUNCHER))}{part}",
        cancelled=shlex.quote(str(folder / CANCELLED)),
    )


def _prepare_script(job: Job) -> str:
    """Return the script that prepares the token store, on one machine and without GPUs."""
    folder = job.folder.absolute()
    options = {name: value for name, value in prepare_options(job, folder).items() if name != "requeue"}
    workers = job.config.data.workers
    if workers != "auto" and workers > 1:
        options.setdefault("cpus-per-task", workers)
    words = ["exec", "srun", "headway", "data", "prepare", str(folder / CONFIG)]
    return f"{script_head(job, options)}\n{shlex.join(words)}\n"


def _seconds(limit: str) -> int:
    """Return a time limit of Slurm in seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:...]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


LAUNCHER = SlurmLauncher()

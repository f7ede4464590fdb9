"""Metaflow: a flow that prepares, trains, evaluates and exports, run here or deployed to Argo Workflows.

The flow is a file of its own: it imports nothing of Headway, calls the commands that a user would type, and may be
changed, scheduled or combined with other flows. `@retry` starts the step that trains again after exit code 75 and after
a kill, and the run continues from its own checkpoints.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.clouds.launchers.api_server import name_problems, read_amount
from headway.clouds.launchers.flow import FLOW, NO_RETRY
from headway.clouds.launchers.job import Job
from headway.clouds.launchers.jobset import INSTALL, JOBSET
from headway.clouds.launchers.launcher import Handle, JobState, State
from headway.clouds.launchers.patches import merge
from headway.clouds.launchers.pods import pod_problems, store_problems, tolerations, volume_of
from headway.clouds.programs import (
    ask_json,
    ask_program,
    check_kind,
    checked_kubectl,
    kubectl_of,
    parse_answer,
    show_pod_logs,
    show_program,
    try_program,
)
from headway.config.sections.launch import KubernetesConfig
from headway.core.coordination.launch_variables import NODE_NUMBERS, OF_A_WORKER
from headway.core.coordination.lease import OWNER_FILE
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.core.machine.system import Machine
from headway.core.process.command import DIES_WITH_PARENT
from headway.core.process.table import arguments_of, process_state
from headway.core.process.tree import end_all
from headway.core.process.waiting import wait_until
from headway.core.version import __version__
from headway.telemetry.gpus import nvidia_devices

CONFIG = "config.yaml"
FILE = "flow.py"
_LOG = "flow.log"
_RUN_ID = "flow.run-id"
_PID = "flow.pid"
_CODE = "flow.exit-code"
_START_SECONDS = 60.0
#: Settings of pods that Metaflow has no word for.
_NOT_IN_A_STEP = (
    "create_namespace", "service_account_annotations", "priority_class", "spread", "pack", "queue", "quota",
    "host_network", "rdma", "metrics_port", "time_slicing", "scratch", "prepared",
)  # fmt: skip
_STEPS = ("start", "prepare", "train", "evaluate", "export", "end")
#: Names of classes that the flow imports.
_TAKEN = ("FlowSpec", "Path")
_ARGO_STATES: dict[str, State] = {
    "Pending": "waiting", "Running": "running", "Succeeded": "finished", "Failed": "failed", "Error": "failed",
}  # fmt: skip
#: What the step after several machines keeps of theirs.
_JOIN = "        self.run_directory = inputs[0].run_directory\n        self.html = inputs[0].html\n"
#: The flow in a process that outlives the launch: its number, then its exit code.
_RUNS_ON = """\
sh -c 'echo $$ > "$0"; exec "$@"' {pid} {command} > {log} 2>&1
echo $? > {code}
"""


class MetaflowLauncher:
    """A launcher for flows of Metaflow."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from job.problems()
        if job.suite is not None:
            yield ConfigError(
                "a flow prepares, trains, evaluates and exports; it measures no suite",
                where="--on",
                fix="--on slurm, or --on kubernetes",
            )
        if job.config.task is not None:
            yield ConfigError(
                "a flow prepares text, and evaluates and exports a language model; the run has a task of its own",
                where="--on, task",
                fix="--on slurm, kubernetes, ray or sky",
            )
        if job.held:
            yield ConfigError(
                "a flow cannot be held: Metaflow starts a step that has stopped again, and waits for no save",
                where="--on",
                fix="--on slurm, kubernetes, ray or sky",
            )
        if job.min_machines is not None:
            yield ConfigError(
                f"a step of Metaflow has all its machines (num_parallel) or none, not {job.machine_range}",
                where="--machines",
                fix=f"--machines {job.machines}, or --on kubernetes or --on slurm, which take a range",
            )
        if not re.search(r"[A-Za-z]", job.name):
            yield ConfigError(f"the name '{job.name}' makes no name of a flow", where="name", fix="name=mine")
        unknown = job.config.launch.metaflow.patch.keys() - set(_STEPS)
        if unknown:
            yield ConfigError(
                f"the flow has no step {', '.join(sorted(unknown))}",
                where="launch.metaflow.patch",
                fix=f"one of {', '.join(_STEPS)}",
            )
        if job.config.launch.metaflow.where == "argo":
            yield from _argo_problems(job)

    def files(self, job: Job) -> dict[str, str]:
        """Return the flow, which holds the config, and the config to read."""
        return {FILE: _flow(job), CONFIG: job.config_text()}

    def check(self, job: Job) -> None:
        """Ask for Metaflow, and for Argo Workflows where it is to run there.

        Raises:
            ConfigError: one of them is not there.
        """
        settings = job.config.launch.metaflow
        kubernetes = job.config.launch.kubernetes
        if try_program([settings.python, "-c", "import metaflow"]).returncode:
            raise ConfigError(
                f"{settings.python} has no Metaflow",
                where="launch.metaflow.python",
                fix="python -m pip install 'metaflow>=2.19' there, or name the interpreter that has it",
            )
        if settings.where == "local":
            _check_gpus(job)
        if settings.where == "argo":
            kubectl = checked_kubectl(kubernetes.context)
            check_kind(
                kubectl,
                "WorkflowTemplate",
                "workflowtemplates.argoproj.io",
                "launch.metaflow.where",
                "kubectl create namespace argo; kubectl apply --namespace argo --filename"
                " https://github.com/argoproj/argo-workflows/releases/latest/download/install.yaml",
            )
            if job.machines > 1:
                check_kind(kubectl, JOBSET.kind, JOBSET.resource, "--machines", INSTALL)

    def submit(self, job: Job, folder: Path) -> Handle:
        """Start the flow in a process of its own, or deploy and trigger it.

        Raises:
            ConfigError: Metaflow refuses it.
        """
        settings = job.config.launch.metaflow
        folder = folder.absolute()
        run_id = folder / _RUN_ID
        for name in (_RUN_ID, _CODE, _PID):
            (folder / name).unlink(missing_ok=True)
        command = [settings.python, str(folder / FILE), "--no-pylint"]
        command += [] if settings.datastore is None else [f"--datastore={settings.datastore}"]
        kubernetes = job.config.launch.kubernetes
        details: dict[str, Any] = {
            "where": settings.where, "folder": str(folder), "command": command,
            "context": kubernetes.context, "namespace": kubernetes.namespace,
        }  # fmt: skip
        if settings.where == "argo":
            command = [*command, "argo-workflows", "--name", job.name]
            ask_program([*command, "create"], seconds=600)
            kubectl = [*kubectl_of(kubernetes.context), f"--namespace={kubernetes.namespace}"]
            template = ["workflowtemplates.argoproj.io", job.name]
            written = ask_json([*kubectl, "get", *template, "--output=json"])
            patch = json.dumps(stop_at_final_codes(written["spec"]["templates"]))
            ask_program([*kubectl, "patch", *template, "--type=json", f"--patch={patch}"])
            ask_program([*command, "trigger", "--run-id-file", str(run_id)])
            details["command"] = command
        else:
            _start(command, folder)
        return Handle(
            "metaflow", run_id.read_text().strip(), job.machine_range, job.grace_seconds, details, time.time()
        )

    def status(self, handle: Handle) -> JobState:
        """Look at the process of the flow, or ask Argo."""
        if handle.details["where"] == "argo":
            kubectl, namespace = _of(handle)
            words = [*kubectl, "get", "workflows.argoproj.io", _workflow(handle), *namespace]
            text = ask_program([*words, "--ignore-not-found", "--output=json"])
            if not text.strip():
                return JobState("gone", "Argo has no such workflow")
            status = parse_answer(words, text).get("status") or {}
            phase = str(status.get("phase") or "Pending")
            said = " ".join(filter(None, (phase, str(status.get("message") or ""))))
            return JobState(_ARGO_STATES.get(phase, "unknown"), said)
        code = Path(handle.details["folder"]) / _CODE
        with suppress(OSError, ValueError):
            number = int(code.read_text())
            return JobState("failed" if number else "finished", f"the flow has ended with exit code {number}")
        if _is_alive(handle):
            return JobState("running", "the flow runs on this machine", int(handle.machines))
        return JobState("gone", "its process is not on this machine any more")

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print the output of the steps."""
        if handle.details["where"] == "argo":
            kubectl, namespace = _of(handle)
            selector = f"workflows.argoproj.io/workflow={_workflow(handle)}"
            # Argo calls the container of a step `main`, Metaflow that of a JobSet by its step.
            container = "main" if handle.machines == "1" else None
            return show_pod_logs(kubectl, namespace, selector, container, follow)
        log = str(Path(handle.details["folder"]) / _LOG)
        return show_program(["tail", "--lines=+1", *(["--follow=name", "--retry"] * follow), log])

    def cancel(self, handle: Handle) -> None:
        """Stop the flow; a step that trains saves.

        Raises:
            ConfigError: Metaflow refuses it.
        """
        if handle.details["where"] == "argo":
            ask_program([*handle.details["command"], "terminate", handle.id])
            return
        if _is_alive(handle):
            # As Ctrl-C does: Metaflow ends its steps, and each step's command saves and ends with it.
            with suppress(ProcessLookupError):
                os.kill(_pid(handle), signal.SIGINT)
            wait_until(lambda: not _is_alive(handle), handle.grace_seconds, 0.5)


def stop_at_final_codes(templates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations of a JSON patch after which Argo does not try a final exit code again.

    Metaflow writes a strategy that tries every code again, and has no word for another one.

    Args:
        templates: The templates of the workflow that Metaflow has written.
    """
    expression = f"asInt(lastRetry.exitCode) != {NO_RETRY}"
    return [
        {"op": "add", "path": f"/spec/templates/{number}/retryStrategy/expression", "value": expression}
        for number, template in enumerate(templates)
        if "retryStrategy" in template
    ]


# The flow -------------------------------------------------------------------------------------------------------------


def _flow(job: Job) -> str:
    launch = job.config.launch
    settings = launch.metaflow
    data = job.config.data
    argo = settings.where == "argo"
    name = "".join(part.title() for part in re.findall("[A-Za-z0-9]+", job.name))
    # A class of this name would hide what the flow calls, or is no Python ("none").
    if not name[0].isalpha() or name in _TAKEN or hasattr(builtins, name):
        name = f"Run{name}"
    lines = "".join(f"    {line!r}\n" for line in job.config_text().splitlines(keepends=True))
    run = job.in_container(job.config.run_directory) if argo else str(job.config.run_directory)
    several = job.machines > 1
    optional = ["kubernetes"] * argo + ["parallel"] * several
    decorators = {f"{step}_decorator": f"    {_kubernetes(job, step)}\n" if argo else "" for step in _STEPS}
    return string.Template(FLOW).substitute(
        decorators,
        name=name,
        run_name=job.name,
        imports=", ".join(sorted(("card", "current", "retry", "step", *optional))),
        machines=job.machines,
        gpus_here=job.gpus if several and not argo else 0,
        num_parallel=", num_parallel=MACHINES" if several else "",
        parallel_decorator="    @parallel\n" if several else "",
        inputs=", inputs" if several else "",
        join=_JOIN if several else "",
        config=f"(\n{lines})",
        run=repr(run),
        workdir=repr(launch.workdir if argo else None),
        environment=repr(dict(launch.environment)),
        launched_by=repr([] if argo else [sys.executable, "-m", "headway"]),
        version=__version__,
        removed=repr(tuple(dict.fromkeys((*OF_A_WORKER, *NODE_NUMBERS)))),
        owner=repr(OWNER_FILE),
        final=repr(FINAL_CODES),
        no_retry=repr(NO_RETRY),
        dies_with_parent=repr(DIES_WITH_PARENT),
        prepares=repr(data.remote is None),
        evaluates=repr(data.validation > 0),
        retries=settings.retries,
        minutes=settings.minutes_between_retries,
    )


def _kubernetes(job: Job, step: str) -> str:
    """Return the decorator by which a step runs in a pod."""
    launch = job.config.launch
    kubernetes = job.config.launch.kubernetes
    trains = step == "train"
    gpus = job.gpus if trains else min(1, job.gpus) if step == "evaluate" else 0
    arguments: dict[str, Any] = {
        "image": launch.image,
        "namespace": kubernetes.namespace,
        "service_account": kubernetes.service_account,
        "secrets": kubernetes.secret_names,
        "image_pull_secrets": kubernetes.pull_secret_names,
        "persistent_volume_claims": {volume.claim: volume.mount for volume in kubernetes.volumes},
        "gpu": gpus or None,
        "gpu_vendor": kubernetes.gpu_resource.partition(".")[0] if gpus else None,
    }
    if step not in ("start", "end"):
        arguments |= {
            "cpu": kubernetes.cpus,
            "memory": None if kubernetes.memory is None else round((read_amount(kubernetes.memory) or 0.0) / 10**6),
        }
    if trains or gpus:
        arguments["node_selector"] = dict(kubernetes.node_selector)
        arguments["tolerations"] = tolerations(kubernetes)
        if trains and kubernetes.shared_memory is not None:
            arguments["shared_memory"] = round((read_amount(kubernetes.shared_memory) or 0.0) / 2**20)
    arguments = merge({key: value for key, value in arguments.items() if value}, launch.metaflow.patch.get(step, {}))
    return f"@kubernetes({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _argo_problems(job: Job) -> Iterator[ConfigError]:
    kubernetes = job.config.launch.kubernetes
    plain = KubernetesConfig()
    yield from name_problems(job, "", is_service=False)
    yield from pod_problems(job)
    yield from store_problems(job)
    if volume_of(job, job.config.run_directory) is None:
        yield ConfigError(
            f"{job.in_container(job.config.run_directory)} is on no volume, and each step is a pod of its own",
            where="runs, launch.kubernetes.volumes",
            fix="mount a ReadWriteMany volume there, for example [{claim: runs, mount: /runs}] with runs=/runs",
        )
    for key in _NOT_IN_A_STEP:
        if getattr(kubernetes, key) != getattr(plain, key):
            yield ConfigError(
                f"a step of Metaflow cannot have launch.kubernetes.{key}",
                where=f"launch.kubernetes.{key}",
                fix="leave it out, or launch with --on kubernetes or --on jobset",
            )


def _check_gpus(job: Job) -> None:
    """Check that this machine has GPUs for all machines of a flow, which are processes here.

    Raises:
        ConfigError: it has too few; without any, they train on its processors.
    """
    devices = nvidia_devices(Machine())
    if job.machines > 1 and 0 < devices < job.gpus * job.machines:
        raise ConfigError(
            f"the {job.machines} machines of a local flow are processes of this one, which has"
            f" {counted(devices, 'GPU')} and not {job.gpus * job.machines}",
            where="--machines",
            fix="fewer machines, train.device=cpu, or launch.metaflow.where=argo",
        )


# Where it runs --------------------------------------------------------------------------------------------------------


def _start(command: list[str], folder: Path) -> None:
    words = [*command, "run", "--run-id-file", str(folder / _RUN_ID)]
    files = {"pid": _PID, "log": _LOG, "code": _CODE}
    paths = {name: shlex.quote(str(folder / file)) for name, file in files.items()}
    script = _RUNS_ON.format(command=shlex.join(words), **paths)
    # With no stream of this command: what reads its output would wait for the end of the flow.
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        ["sh", "-c", script], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )
    wait_until(lambda: (folder / _RUN_ID).exists() or process.poll() is not None, _START_SECONDS, 0.1)
    if not (folder / _RUN_ID).exists():
        end_all([process.pid])  # a flow without a handle could be neither followed nor cancelled
        said = (folder / _LOG).read_text(errors="replace").strip().splitlines()
        raise ConfigError(
            f"the flow has not started: {said[-1] if said else 'it says nothing'}",
            where=str(folder / _LOG),
            fix=f"correct what it names; the flow can be tried by hand: {shlex.join([*command, 'run'])}",
        )


def _pid(handle: Handle) -> int:
    return int((Path(handle.details["folder"]) / _PID).read_text())


def _is_alive(handle: Handle) -> bool:
    """Return whether the flow's process is there: by its number and, since numbers return, by its command line."""
    try:
        pid = _pid(handle)
    except (OSError, ValueError):
        return False
    return process_state(pid) is not None and str(Path(handle.details["folder"]) / FILE) in arguments_of(pid)


def _workflow(handle: Handle) -> str:
    return handle.id.removeprefix("argo-")


def _of(handle: Handle) -> tuple[list[str], list[str]]:
    return kubectl_of(handle.details["context"]), [f"--namespace={handle.details['namespace']}"]


LAUNCHER = MetaflowLauncher()

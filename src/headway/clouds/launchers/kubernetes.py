"""Kubernetes: one indexed Job, whose pod 0 leads; and what all kinds of job share, driven by `kubectl`.

One Job, not one for a master and one for workers: the machine that leads trains like the others, so all pods have one
template, one failure policy and one place in a queue, and are removed together.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.clouds.launchers.api_server import name_problems
from headway.clouds.launchers.job import Job
from headway.clouds.launchers.launcher import ALIVE, Handle, JobState, State
from headway.clouds.launchers.patches import patched
from headway.clouds.launchers.pods import (
    CONFIG_FOLDER,
    CONTAINER,
    manifest,
    metadata,
    pod_problems,
    pod_template,
    secret_name,
)
from headway.clouds.launchers.support_objects import support_objects, time_slicing_object
from headway.clouds.programs import (
    ask_json,
    ask_program,
    check_kind,
    checked_kubectl,
    kubectl_of,
    parse_answer,
    show_pod_logs,
    try_program,
)
from headway.core.console import notice
from headway.core.coordination.launch_variables import SECRET
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.errors import ConfigError, Preempted

SUPPORT = "10-support.yaml"
PREPARE = "20-prepare.yaml"
TRAIN = "30-train.yaml"
SECRET_PAGE = "secret.md"
TIME_SLICING = "time-slicing.yaml"
#: How long Kubernetes may take to remove a pod after its time to save.
_REMOVAL_SECONDS = 60
_LOOK_SECONDS = 3.0
#: Kinds that outlive a run: others use them too, or they hold its data.
KEPT_KINDS = ("Namespace", "PersistentVolumeClaim", "ResourceQuota")


@dataclass(frozen=True)
class Envelope:
    """A kind of job around the pod of a machine."""

    target: str
    """Its name in `--on`, and its section of `launch`."""
    kind: str
    resource: str
    """Its name for kubectl."""
    documents: Callable[[Job], list[dict[str, Any]]]
    """The manifests of a run; the job is the last one."""
    read_state: Callable[[dict[str, Any]], tuple[State, str]]
    """`state_of` for an object that is not being removed."""
    container: str = CONTAINER
    """The container of its pods that trains."""
    install: str | None = None
    """How to install its controller; None if Kubernetes has it."""
    suffix: str = "-{last}"
    """What the engine appends in the longest name that it makes of the run's; `{last}` is the last machine."""
    makes_services: bool = True
    """It makes Services named after the run, whatever the number of machines."""
    shares_secret: bool = True
    """Machines find each other by their names, and share a secret; Ray has its own ways."""
    pod_security: str = "restricted"
    """The level of Pod Security that its pods keep to, with what the controller adds to them."""

    def state_of(self, document: dict[str, Any]) -> tuple[State, str]:
        """Return a job's state, and the engine's words, from the object that the API server has."""
        if document["metadata"].get("deletionTimestamp"):
            return "stopping", "is being removed"
        return self.read_state(document)


class KubernetesLauncher:
    """A launcher for one kind of job."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from job.problems()
        suffix = self.envelope.suffix.format(last=job.machines - 1)
        yield from name_problems(job, suffix, is_service=self.envelope.makes_services or job.machines > 1)
        yield from pod_problems(job)

    def files(self, job: Job) -> dict[str, str]:
        """Return the manifests: what stands beside the job, the job that prepares the data, and the run."""
        kubernetes = job.config.launch.kubernetes
        groups = {
            SUPPORT: list(support_objects(job, self.envelope.pod_security)),
            PREPARE: list(_prepare(job)),
            TRAIN: self.envelope.documents(job),
        }
        found = self._patched(job, groups)
        if kubernetes.time_slicing is not None:
            found[TIME_SLICING] = [time_slicing_object(kubernetes.time_slicing, kubernetes.gpu_resource)]
        files = {name: yaml_text(documents) for name, documents in found.items() if documents}
        if self._shares_secret(job):
            files[SECRET_PAGE] = _SECRET_PAGE.format(
                name=secret_name(job), namespace=kubernetes.namespace, key=SECRET, run=job.name
            )
        return files

    def _shares_secret(self, job: Job) -> bool:
        return self.envelope.shares_secret and job.machines > 1

    def _patched(self, job: Job, groups: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
        """Merge the patches, which may change manifests of any file; those that are added belong to the first one."""
        launch = job.config.launch
        place = {_key(document): name for name, documents in groups.items() for document in documents}
        documents = [document for group in groups.values() for document in group]
        documents = patched(documents, launch.kubernetes.patch, "launch.kubernetes.patch")
        if self.envelope.target != "kubernetes":
            own = getattr(launch, self.envelope.target).patch
            documents = patched(documents, own, f"launch.{self.envelope.target}.patch")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in groups}
        for document in documents:
            found[place.get(_key(document), SUPPORT)].append(document)
        return found

    def check(self, job: Job) -> None:
        """Ask the API server for the context, the kind of job, and the GPUs.

        Raises:
            ConfigError: one of them is not there.
        """
        kubernetes = job.config.launch.kubernetes
        envelope = self.envelope
        kubectl = checked_kubectl(kubernetes.context)
        if envelope.install is not None:
            check_kind(kubectl, envelope.kind, envelope.resource, f"--on {envelope.target}", envelope.install)
        self._check_gpus(job, kubectl)
        words = [*kubectl, "get", envelope.resource, job.name, *_in(job), "--ignore-not-found", "--output=json"]
        kept = try_program(words)
        if not kept.returncode and kept.stdout.strip():
            state, said = envelope.state_of(parse_answer(words, kept.stdout))
            if state in ALIVE:
                raise ConfigError(
                    f"the cluster has a job of this name already: {said}",
                    where=f"{envelope.kind} {job.name}",
                    fix=f"headway launch cancel {job.directory}, or choose another name=...",
                )

    def _check_gpus(self, job: Job, kubectl: Sequence[str]) -> None:
        kubernetes = job.config.launch.kubernetes
        wanted = job.gpus * job.machines
        if not wanted or kubernetes.autoscaled:
            return
        words = [*kubectl, "get", "nodes", "--output=json"]
        asked = try_program(words)
        if asked.returncode:  # who may start jobs need not be allowed to see nodes
            return
        allocatable = [
            node.get("status", {}).get("allocatable", {}) for node in parse_answer(words, asked.stdout)["items"]
        ]
        counts = [int(found.get(kubernetes.gpu_resource, 0)) for found in allocatable]
        fitting = sum(count // job.gpus for count in counts)
        if fitting < job.machines:
            raise ConfigError(
                f"the run needs {job.machines} machines with {job.gpus} {kubernetes.gpu_resource} each, and the"
                f" cluster has {sum(counts)} on {sum(map(bool, counts))} nodes: room for {fitting}",
                where="--machines, parallel.workers",
                fix="take fewer, or launch.kubernetes.autoscaled=true where nodes are added on demand",
            )

    def submit(self, job: Job, folder: Path) -> Handle:
        """Apply the files: first what stands beside the job, then the job that prepares the data, then the run.

        Raises:
            ConfigError: the API server refuses one, or the preparation fails.
        """
        kubernetes = job.config.launch.kubernetes
        kubectl = kubectl_of(kubernetes.context)
        ask_program([*kubectl, "apply", "--filename", str(folder / SUPPORT)])
        if self._shares_secret(job):
            _create_secret(job, kubectl)
        if (folder / PREPARE).exists():
            ask_program([*kubectl, "apply", "--filename", str(folder / PREPARE)])
            _wait_for_data(job, kubectl)
        # A finished job of this name stands in the way: most of a job cannot be changed.
        delete = ["delete", self.envelope.resource, job.name, *_in(job), "--ignore-not-found", "--cascade=foreground"]
        ask_program([*kubectl, *delete], seconds=job.grace_seconds + _REMOVAL_SECONDS)
        ask_program([*kubectl, "apply", "--filename", str(folder / TRAIN)])
        names = [_parse_name(document) for document in _documents(folder / TRAIN)]
        beside = [
            _parse_name(document) for document in _documents(folder / SUPPORT) if document["kind"] not in KEPT_KINDS
        ]
        shared = [f"secret/{secret_name(job)}"] if self._shares_secret(job) else []
        # The job goes first: what it needs must outlive its pods.
        details = {
            "context": kubernetes.context,
            "namespace": kubernetes.namespace,
            "objects": [*reversed(names), *reversed(beside), *shared],
        }
        return Handle(self.envelope.target, job.name, job.machine_range, job.grace_seconds, details, time.time())

    def status(self, handle: Handle) -> JobState:
        """Ask the API server how a job and its pods are."""
        kubectl, namespace = _of(handle)
        asked = [*kubectl, "get", self.envelope.resource, handle.id, *namespace]
        asked += ["--ignore-not-found", "--output=json"]
        text = ask_program(asked)
        if not text.strip():
            return JobState("gone", "there is no such job any more")
        state, words = self.envelope.state_of(parse_answer(asked, text))
        pods = ask_json([*kubectl, "get", "pods", *namespace, "--selector", _selector(handle.id), "-ojson"])
        running = [pod for pod in pods["items"] if pod.get("status", {}).get("phase") == "Running"]
        reasons = {text for pod in pods["items"] for text in _waiting_for(pod)}
        return JobState(state, "; ".join([words, *sorted(reasons)]), len(running))

    def logs(self, handle: Handle, follow: bool) -> int:
        """Print the output of all pods, each line with the name of its pod."""
        kubectl, namespace = _of(handle)
        return show_pod_logs(kubectl, namespace, _selector(handle.id), self.envelope.container, follow)

    def cancel(self, handle: Handle) -> None:
        """Remove the job, whose pods get SIGTERM and the time to save, then what stands beside it.

        Raises:
            ConfigError: the API server refuses it.
        """
        kubectl, namespace = _of(handle)
        for name in handle.details["objects"]:
            words = [*kubectl, "delete", name, *namespace, "--ignore-not-found", "--cascade=foreground", "--wait"]
            ask_program(words, seconds=handle.grace_seconds + _REMOVAL_SECONDS)


# The plain job --------------------------------------------------------------------------------------------------------


def job_spec(job: Job, lead: str, container: str = CONTAINER) -> dict[str, Any]:
    """Return the spec of an indexed Job of all machines, which other kinds of job contain too."""
    kubernetes = job.config.launch.kubernetes
    again = {"containerName": container, "operator": "In", "values": [Preempted.exit_code]}
    # A bench of which no cell came out ends with 1, and another one would not come out either.
    codes = [*FINAL_CODES] if job.suite is None else [1, *FINAL_CODES]
    final = {"containerName": container, "operator": "In", "values": codes}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    # A suite is measured when its lead says so: the others would wait for another one.
    leads = {"succeededIndexes": "0"}
    until_lead_ends = {} if job.suite is None or job.machines == 1 else {"successPolicy": {"rules": [leads]}}
    return {
        **until_lead_ends,
        "completionMode": "Indexed",
        "completions": job.machines,
        "parallelism": job.machines,
        "backoffLimit": kubernetes.max_failures * job.machines,
        # A pod whose node is gone is replaced only when it has surely ended: two would fight over one place.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": final},
                {"action": "Ignore", "onExitCodes": again},
                {"action": "Ignore", "onPodConditions": [evicted]},
            ]
        },
        "template": pod_template(job, lead, container=container),
    }


def with_queue(job: Job, document: dict[str, Any]) -> dict[str, Any]:
    """Add the label by which Kueue holds a job until there is room for all of it."""
    queue = job.config.launch.kubernetes.queue
    if queue is not None and queue.kind == "kueue":
        document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue.name
    return document


def _plain_job(job: Job) -> list[dict[str, Any]]:
    spec = job_spec(job, f"{job.name}-0.{job.name}")
    spec["ttlSecondsAfterFinished"] = job.config.launch.kubernetes.keep_seconds
    if job.machines > 1:  # the Service of the run names its pods
        spec["template"]["spec"]["subdomain"] = job.name
    return [with_queue(job, manifest("batch/v1", "Job", metadata(job), spec=spec))]


def _job_state(document: dict[str, Any]) -> tuple[State, str]:
    """Return the state of a Job of Kubernetes."""
    ended = state_by_condition(document, {"Complete": "finished", "Failed": "failed"})
    if ended is not None:
        return ended
    if (document.get("spec") or {}).get("suspend"):
        return "waiting", "suspended"
    status = document.get("status") or {}
    counts = [f"{status.get(name) or 0} {name}" for name in ("active", "ready", "succeeded", "failed")]
    return ("running" if status.get("ready") else "waiting"), ", ".join(counts)


def state_by_condition(document: dict[str, Any], states: Mapping[str, State]) -> tuple[State, str] | None:
    """Return the state of the first condition that holds, and the engine's words; None if none of them holds."""
    found = {one["type"]: one for one in true_conditions(document)}
    for name, state in states.items():
        if name in found:
            return state, f"{name} {found[name].get('message') or ''}".strip()
    return None


def true_conditions(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions of an object that hold."""
    conditions = (document.get("status") or {}).get("conditions") or []
    return [one for one in conditions if one.get("status") == "True"]


def _prepare(job: Job) -> Iterator[dict[str, Any]]:
    """Yield the job that prepares the token store; it finds what is there already, and then ends at once."""
    data = job.config.data
    has_store = job.config.task is None and job.suite is None and data.remote is None
    if not has_store or job.config.launch.kubernetes.prepared or job.machines == 1:
        return  # on one machine the run prepares it itself
    command = ["headway", "data", "prepare", f"{CONFIG_FOLDER}/config.yaml"]
    spec = {
        "backoffLimit": job.config.launch.kubernetes.max_failures,
        "ttlSecondsAfterFinished": job.config.launch.kubernetes.keep_seconds,
        "template": pod_template(job, "", command, "prepare"),
    }
    about = metadata(job, f"{job.name}-prepare", "prepare")
    yield with_queue(job, manifest("batch/v1", "Job", about, spec=spec))


# kubectl --------------------------------------------------------------------------------------------------------------

_SECRET_PAGE = """# The secret of {run}

The machines of a run share a secret, which is in no file. `headway launch` creates it. By hand:

    head -c 32 /dev/urandom | base64 | kubectl --namespace {namespace} create secret generic {name} \\
        --from-file={key}=/dev/stdin
"""


def _create_secret(job: Job, kubectl: Sequence[str]) -> None:
    """Create the secret of the machines unless it is there; it goes through a pipe."""
    name = secret_name(job)
    found = ask_program([*kubectl, "get", "secret", name, *_in(job), "--ignore-not-found", "--output=name"])
    if found.strip():
        return
    content = {SECRET: secrets.token_hex(32)}
    made = manifest("v1", "Secret", metadata(job, name), type="Opaque", stringData=content)
    ask_program([*kubectl, "create", "--filename=-"], stdin=yaml_text([made]))


def _wait_for_data(job: Job, kubectl: Sequence[str]) -> None:
    name = f"{job.name}-prepare"
    notice(f"waiting for the data: job {name}; Ctrl-C leaves it running, and the same command continues")
    said: set[str] = set()
    while True:
        found = ask_json([*kubectl, "get", "jobs.batch", name, *_in(job), "--output=json"])
        state, words = LAUNCHER.envelope.state_of(found)
        if state == "finished":
            return
        if state == "failed":
            namespace = _in(job)[0]
            raise ConfigError(
                f"the data cannot be prepared: {words}",
                where=f"job {name}",
                fix=f"kubectl logs {namespace} job/{name}; then kubectl delete {namespace} job/{name}",
            )
        # Without room or without its image a pod waits for as long as it exists.
        asked = [*kubectl, "get", "pods", *_in(job), "--selector", _selector(job.name, "prepare"), "--output=json"]
        pods = try_program(asked)
        if not pods.returncode and pods.stdout.strip():
            reasons = {text for pod in parse_answer(asked, pods.stdout)["items"] for text in _waiting_for(pod)}
            for reason in sorted(reasons - said):
                notice(f"job {name}: {reason}")
            said |= reasons
        time.sleep(_LOOK_SECONDS)


def _selector(name: str, component: str = "train") -> str:
    return f"app.kubernetes.io/instance={name},app.kubernetes.io/component={component}"


def _in(job: Job) -> list[str]:
    return [f"--namespace={job.config.launch.kubernetes.namespace}"]


def _of(handle: Handle) -> tuple[list[str], list[str]]:
    return kubectl_of(handle.details.get("context")), [f"--namespace={handle.details['namespace']}"]


def _waiting_for(pod: dict[str, Any]) -> Iterator[str]:
    """Yield why a pod does not run: no room, no image, ..."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("reason") == "Unschedulable":
            yield str(condition.get("message") or "unschedulable")
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating"):
            yield f"{waiting['reason']} {waiting.get('message') or ''}".strip()


def yaml_text(documents: Sequence[dict[str, Any]]) -> str:
    """Return manifests as the text of a file."""
    import yaml

    return str(yaml.dump_all(documents, Dumper=_plain_dumper(), sort_keys=False, width=120, allow_unicode=True))


def _plain_dumper() -> Any:
    """Return a dumper without anchors, which kubectl reads and people do not, and with long texts as blocks."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Plain.add_representer(
        str,
        lambda dumper, text: dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        ),
    )
    return Plain


def _documents(path: Path) -> list[dict[str, Any]]:
    import yaml

    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _parse_name(document: dict[str, Any]) -> str:
    """Return what kubectl calls an object, with its group, since other controllers may have a kind of that name."""
    group, slash, _ = document["apiVersion"].partition("/")
    kind = document["kind"].lower()
    if slash:
        kind = f"{kind}.{group}"
    return f"{kind}/{document['metadata']['name']}"


LAUNCHER = KubernetesLauncher(
    Envelope(
        target="kubernetes",
        kind="Job",
        resource="jobs.batch",
        documents=_plain_job,
        read_state=_job_state,
        makes_services=False,
    )
)

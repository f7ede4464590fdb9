"""The pod of a machine on Kubernetes, and the objects that stand beside it: the same for every kind of job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from headway.clouds.launchers.api_server import read_amount, value_problems
from headway.clouds.launchers.job import Job, survival_problems
from headway.config.sections.launch import KubernetesConfig, VolumeConfig
from headway.core.coordination.launch_variables import LEAD, LISTEN, MACHINES, SECRET
from headway.core.errors import ConfigError
from headway.core.storage import scheme_of

CONFIG_FOLDER = "/etc/headway"
CONTAINER = "headway"
#: Size of /dev/shm where neither it nor the memory of the machine is given.
_SHARED_MEMORY = "64Gi"
#: How much of its node's disk is kept for a pod.
_RESERVED_SCRATCH = "1Gi"


def labels(job: Job, component: str = "train") -> dict[str, str]:
    """Return the labels of a run's objects."""
    return {
        "app.kubernetes.io/name": "headway",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def metadata(job: Job, name: str | None = None, component: str = "train") -> dict[str, Any]:
    """Return the metadata of an object of a run, which is named like the run if it has no name of its own."""
    namespace = job.config.launch.kubernetes.namespace
    return {"name": name or job.name, "namespace": namespace, "labels": labels(job, component)}


def manifest(version: str, kind: str, about: Mapping[str, Any], **content: Any) -> dict[str, Any]:
    """Return an object of Kubernetes: its API and kind, its metadata, and what else it has."""
    return {"apiVersion": version, "kind": kind, "metadata": about, **content}


def variables(values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return variables of the environment as a container's spec lists them."""
    return [{"name": name, "value": value} for name, value in values.items()]


def mounted(
    name: str, path: str, source: Mapping[str, Any], *, read_only: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mount of a volume at a path, and the volume."""
    mount: dict[str, Any] = {"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})}
    return mount, {"name": name, **source}


def secret_name(job: Job) -> str:
    """Return the name of the secret that the machines of a run share."""
    return f"{job.name}-machines"


def pod_problems(job: Job) -> Iterator[ConfigError]:
    """Yield what makes a run impossible on Kubernetes, as far as its config shows it."""
    yield from value_problems(job)
    if job.config.launch.image is None:
        yield ConfigError(
            "Kubernetes needs an image with Headway and your code",
            where="launch.image",
            fix="launch.image=registry.example/headway:0.1",
        )
    shared = volume_of(job, job.config.run_directory) is not None
    yield from survival_problems(
        job, shared, "mount a ReadWriteMany volume there with launch.kubernetes.volumes, for example"
        " [{claim: runs, mount: /runs}] with runs=/runs"
    )  # fmt: skip
    if job.machines > 1 and job.suite is None:
        yield from store_problems(job)
    yield from _source_problems(job)
    yield from _quota_problems(job)


def store_problems(job: Job) -> Iterator[ConfigError]:
    """Yield a problem if pods cannot see the token store that another one prepares."""
    store = job.config.data.store
    reads_store = job.config.task is None and job.config.data.remote is None
    if reads_store and volume_of(job, store, writes=False) is None:
        yield ConfigError(
            f"the token store {job.in_container(store)} is on no volume that all machines mount",
            where="data.store, launch.kubernetes.volumes",
            fix="put it on a volume, for example data.store=/data/store with [{claim: data, mount: /data}]",
        )


def _source_problems(job: Job) -> Iterator[ConfigError]:
    """Yield the sources that no pod can read; a path below the working directory of the container is in the image."""
    data = job.config.data
    launch = job.config.launch
    if data.remote is not None or launch.kubernetes.prepared or job.suite is not None or job.config.task is not None:
        return
    for source in data.sources:
        if scheme_of(source.path) is not None or ":" in source.path.partition("/")[0]:
            continue
        in_image = PurePosixPath(source.path).is_relative_to(launch.workdir)
        if not in_image and volume_of(job, source.path, writes=False) is None:
            yield ConfigError(
                f"no pod can see {source.path}: it is on no volume",
                where="data.sources",
                fix="mount it with launch.kubernetes.volumes, or give a URL; if the image has it, its full path below"
                f" {launch.workdir}; if the store is prepared, launch.kubernetes.prepared=true",
            )


def _quota_problems(job: Job) -> Iterator[ConfigError]:
    kubernetes = job.config.launch.kubernetes
    wanted = {f"requests.{kubernetes.gpu_resource}": job.gpus * job.machines, "pods": job.machines}
    for name, count in wanted.items():
        allowed = str(kubernetes.quota.get(name, ""))
        if allowed.isdecimal() and count > int(allowed):
            yield ConfigError(
                f"the run needs {count} of {name}, and launch.kubernetes.quota allows {allowed}",
                where="launch.kubernetes.quota",
                fix="raise the quota, or take fewer machines with --machines",
            )


def volume_of(job: Job, path: Any, *, writes: bool = True) -> VolumeConfig | None:
    """Return the volume that a path of the config lies on, if it may be written there."""
    place = PurePosixPath(job.in_container(path))
    volumes = job.config.launch.kubernetes.volumes
    found = [volume for volume in volumes if place.is_relative_to(volume.mount) and not (writes and volume.read_only)]
    return max(found, key=lambda volume: len(volume.mount), default=None)


def pod_template(
    job: Job,
    lead: str | None,
    command: list[str] | None = None,
    component: str = "train",
    *,
    container: str = CONTAINER,
) -> dict[str, Any]:
    """Return the template of a machine's pod.

    Args:
        job: The run.
        lead: Host name of the machine that leads, for a run on several that finds it by its name.
        command: What the container runs; that of the job when not given.
        component: What the pod is part of.
        container: Name of the container.
    """
    launch = job.config.launch
    kubernetes = launch.kubernetes
    trains = component == "train"
    volumes = list(_volumes(job, trains))
    ports = _ports(job) if trains else []
    container_spec = {
        "name": container,
        "command": command or job.command(f"{CONFIG_FOLDER}/config.yaml"),
        "workingDir": launch.workdir,
        "env": _environment(job, lead if trains else None),
        **({"ports": ports} if ports else {}),
        "resources": resources(job, trains),
        "securityContext": container_security(rdma=trains and kubernetes.rdma is not None),
    }
    pod = {"restartPolicy": "Never", **pod_spec(job, container_spec, volumes, job.grace_seconds)}
    pod |= placement(job, trains)
    annotations = {}
    if trains and kubernetes.host_network is not None:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        annotations["headway/host-network-reason"] = kubernetes.host_network.reason
    if trains and kubernetes.rdma is not None:
        annotations["headway/rdma-reason"] = kubernetes.rdma.reason
    if kubernetes.queue is not None and kubernetes.queue.kind == "volcano" and trains:
        annotations["scheduling.k8s.io/group-name"] = job.name
    about = {"labels": labels(job, component)} | ({"annotations": annotations} if annotations else {})
    return {"metadata": about, "spec": pod}


def pod_spec(
    job: Job, container: Mapping[str, Any], volumes: Sequence[tuple[Any, Any]], grace_seconds: int
) -> dict[str, Any]:
    """Return what every pod of Headway has: its account, its rights, and one container with its image and volumes.

    Args:
        job: The run.
        container: What else its container has.
        volumes: Mounts with their volumes.
        grace_seconds: Time between the signal to end and the kill.
    """
    kubernetes = job.config.launch.kubernetes
    secrets = [{"secretRef": {"name": name}} for name in kubernetes.secret_names]
    whole = {
        "name": container["name"],
        "image": job.config.launch.image,
        **container,
        **({"envFrom": secrets} if secrets else {}),
        "volumeMounts": [mount for mount, _ in volumes],
    }
    spec: dict[str, Any] = {
        "serviceAccountName": kubernetes.service_account or job.name,
        # It asks nothing of the API server, so it gets no token for it.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": pod_security(kubernetes),
        "containers": [whole],
        "volumes": list({volume["name"]: volume for _, volume in volumes}.values()),
    }
    if kubernetes.pull_secret_names:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.pull_secret_names]
    return spec


def _environment(job: Job, lead: str | None) -> list[dict[str, Any]]:
    """Return the variables of a machine; its number it finds itself, or its envelope adds it."""
    plain = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", **job.config.launch.environment}
    found = variables(plain)
    if lead is not None and job.machines > 1:
        found += [
            {"name": MACHINES, "value": job.machine_range},
            {"name": LEAD, "value": f"{lead}:{job.config.launch.port}"},
            # Names of pods appear some seconds after their start, so a lead must not need its own.
            {"name": LISTEN, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": SECRET}}},
        ]
    return found


def _ports(job: Job) -> list[dict[str, Any]]:
    metrics = job.config.launch.kubernetes.metrics_port
    found = [{"name": "lead", "containerPort": job.config.launch.port}] if job.machines > 1 else []
    return found + ([] if metrics is None else [{"name": "metrics", "containerPort": metrics}])


def resources(job: Job, trains: bool) -> dict[str, Any]:
    """Return what a container asks for, and its limits; GPUs only where it computes."""
    kubernetes = job.config.launch.kubernetes
    found: dict[str, Any] = {}
    if kubernetes.cpus is not None:
        found["cpu"] = f"{kubernetes.cpus:g}"
    if kubernetes.memory is not None:
        found["memory"] = kubernetes.memory
    # What pods write on their node is bounded, and little of it is reserved: most runs write to volumes.
    requests = {**found, "ephemeral-storage": min(kubernetes.scratch, _RESERVED_SCRATCH, key=_size)}
    limits = {**found, "ephemeral-storage": kubernetes.scratch}
    if trains and job.gpus:
        limits[kubernetes.gpu_resource] = str(job.gpus)
    if trains and kubernetes.rdma is not None:
        limits[kubernetes.rdma.resource] = str(kubernetes.rdma.count)
    # The same amounts as requests and limits: the pod is evicted last (QoS class Guaranteed).
    return {"requests": limits | requests, "limits": limits}


def pod_security(kubernetes: KubernetesConfig) -> dict[str, Any]:
    """Return the security context of a pod, as the level `restricted` wants it."""
    return {
        "runAsNonRoot": True,
        "runAsUser": kubernetes.user,
        "runAsGroup": kubernetes.user,
        "fsGroup": kubernetes.user,
        # Otherwise every start would walk through all checkpoints to set their group.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, rdma: bool = False) -> dict[str, Any]:
    """Return the security context of a container: it writes to volumes only, and gains no rights."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if rdma:
        capabilities["add"] = ["IPC_LOCK"]  # registered memory is locked memory
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": capabilities}


def _volumes(job: Job, trains: bool) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield mounts with their volumes; only the machines that train mount data for reading only."""
    kubernetes = job.config.launch.kubernetes
    shm = {"medium": "Memory", "sizeLimit": kubernetes.shared_memory or kubernetes.memory or _SHARED_MEMORY}
    scratch = {"emptyDir": {"sizeLimit": kubernetes.scratch}}
    yield mounted("config", CONFIG_FOLDER, {"configMap": {"name": job.name}}, read_only=True)
    yield mounted("shm", "/dev/shm", {"emptyDir": shm})
    yield mounted("tmp", "/tmp", scratch)
    for number, volume in enumerate(kubernetes.volumes):
        yield claimed(number, volume, read_only=volume.read_only and trains)
    # What lies on no volume needs a folder that the container's user may write to.
    stores = [("store", job.config.data.store)] if job.config.task is None else []
    for name, path in (("runs", job.config.runs), *stores):
        if volume_of(job, path, writes=name == "runs") is None:
            yield mounted(name, job.in_container(path), scratch)


def claimed(number: int, volume: VolumeConfig, *, read_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mount of a claim, and its volume."""
    claim = {"claimName": volume.claim, **({"readOnly": True} if read_only else {})}
    return mounted(f"volume-{number}", volume.mount, {"persistentVolumeClaim": claim}, read_only=read_only)


def tolerations(kubernetes: KubernetesConfig) -> list[dict[str, Any]]:
    """Return the taints that the pods tolerate, as a pod's spec lists them."""
    return [
        {
            "key": toleration.key,
            **({"operator": "Exists"} if toleration.value is None else {"value": toleration.value}),
            **({} if toleration.effect is None else {"effect": toleration.effect}),
        }
        for toleration in kubernetes.tolerations
    ]


def placement(job: Job, trains: bool) -> dict[str, Any]:
    """Return where a pod may be placed; the pods of a training also spread or stay together."""
    kubernetes = job.config.launch.kubernetes
    found: dict[str, Any] = {}
    if kubernetes.priority_class is not None:
        found["priorityClassName"] = kubernetes.priority_class
    if kubernetes.node_selector:
        found["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.tolerations:
        found["tolerations"] = tolerations(kubernetes)
    if not trains:
        return found
    selector = {"matchLabels": labels(job)}
    if kubernetes.spread is not None:
        constraint = {"maxSkew": 1, "topologyKey": kubernetes.spread, "whenUnsatisfiable": "ScheduleAnyway"}
        found["topologySpreadConstraints"] = [{**constraint, "labelSelector": selector}]
    if kubernetes.pack is not None:
        term = {"topologyKey": kubernetes.pack, "labelSelector": selector}
        found["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    if kubernetes.queue is not None and kubernetes.queue.kind == "volcano":
        found["schedulerName"] = "volcano"
    return found


def _size(amount: str) -> float:
    return read_amount(amount) or 0.0

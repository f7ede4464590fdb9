"""A server of a model on Kubernetes: a Deployment with its Service, probes and the bounds of its autoscaling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.clouds.launchers.api_server import name_problems, value_problems
from headway.clouds.launchers.job import Job
from headway.clouds.launchers.kubernetes import yaml_text
from headway.clouds.launchers.patches import patched
from headway.clouds.launchers.pods import (
    claimed,
    container_security,
    labels,
    manifest,
    metadata,
    mounted,
    placement,
    pod_spec,
    resources,
    variables,
    volume_of,
)
from headway.clouds.launchers.support_objects import egress_to, network_policy, support_objects
from headway.clouds.programs import ask_program, checked_kubectl, try_program
from headway.core.errors import ConfigError
from headway.core.hub import is_on_hub
from headway.core.storage import scheme_of

SUPPORT = "10-support.yaml"
SERVE = "20-serve.yaml"
SECRETS_PAGE = "secrets.md"
COMPONENT = "serve"
#: Port of the container; the Service has 443.
PORT = 8000
_KEY_FILE = "api-key"
_SECRETS = "/etc/headway/secrets"
_CACHE = "/cache"
#: Objects beside a run that a server needs too.
_SHARED = ("Namespace", "ServiceAccount", "PersistentVolumeClaim", "ResourceQuota")
#: Time in which a model may be fetched and loaded, in looks of ten seconds.
_LOOKS_AT_START = 180
#: Between the signal to end and the end of the last reply.
_DRAIN_SECONDS = 15
_GRACE_SECONDS = 660
_METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)=([0-9]+[mk]?)")


@dataclass(frozen=True)
class ServedModel:
    """Say which model is served, to whom, and by how many pods."""

    model: str
    """A version of a registry, a model of the Hub, or a folder on a volume."""
    is_registered: bool
    """Whether `model` is a version of a registry."""
    registry: str | None
    least: int
    most: int
    key_secret: str
    """Name of the Secret with the key that clients send, as `api-key`."""
    tls_secret: str
    """Name of the Secret of type kubernetes.io/tls with the certificate."""
    metric: str | None = None
    """Metric of a pod and its wanted mean, `NAME=8`; the processors' use if None."""
    options: Sequence[str] = ()
    """More options of `headway serve`."""


def problems(job: Job, served: ServedModel) -> Iterator[ConfigError]:
    """Yield what is wrong with a server, as far as its settings show it."""
    launch = job.config.launch
    yield from name_problems(job, "", is_service=True)
    yield from value_problems(job)
    if launch.image is None:
        yield ConfigError(
            "Kubernetes needs an image with Headway and its extra serve",
            where="launch.image",
            fix="launch.image=registry.example/headway-serve:0.1",
        )
    if not 1 <= served.least <= served.most:
        yield ConfigError(
            f"{served.least}:{served.most} are no bounds", where="--replicas", fix="--replicas 2, or --replicas 1:4"
        )
    if served.metric is not None and not _METRIC.fullmatch(served.metric):
        yield ConfigError(
            f"'{served.metric}' is no metric with a value",
            where="--scale-on",
            fix="--scale-on headway_serve_requests_running=8",
        )
    if served.most > served.least and served.metric is None and (launch.kubernetes.cpus is None or job.gpus):
        yield ConfigError(
            "the use of processors, by which pods are added, is not known or says nothing",
            where="--replicas, launch.kubernetes.cpus",
            fix="launch.kubernetes.cpus=8 for pods without a GPU, or --scale-on METRIC=VALUE, or --replicas 2",
        )
    yield from _place_problems(job, served)


def _place_problems(job: Job, served: ServedModel) -> Iterator[ConfigError]:
    """Yield a problem if no pod can see the model."""
    if is_on_hub(served.model):
        yield ConfigError(
            "a server does not download models of the Hub: another commit could be served after each restart",
            where=served.model,
            fix=f"headway registry add {served.model} --name NAME --registry s3://..., and serve NAME@1",
        )
        return
    place = served.registry if served.is_registered else served.model
    if place is None:
        fix = "--registry s3://bucket/registry, or a folder on a volume"
        yield ConfigError("no pod can see the registry of this machine", where="--registry", fix=fix)
    elif scheme_of(place) is None and volume_of(job, place, writes=False) is None:
        yield ConfigError(
            f"no pod can see {place}: it is on no volume",
            where="--registry" if served.is_registered else "MODEL",
            fix="mount it with launch.kubernetes.volumes=[{claim: models, mount: /models, read_only: true}]",
        )


def files(job: Job, served: ServedModel) -> dict[str, str]:
    """Return the manifests: what stands beside the server, the server, and how its secrets are made."""
    support = [one for one in support_objects(job) if one["kind"] in _SHARED]
    for document in support:
        given = document["metadata"].get("labels", {})
        if "app.kubernetes.io/component" in given:
            given["app.kubernetes.io/component"] = COMPONENT
    serve = list(_server(job, served))
    kinds = {(one["kind"], one["metadata"]["name"]) for one in support}
    documents = patched([*support, *serve], job.config.launch.kubernetes.patch, "launch.kubernetes.patch")
    beside = [one for one in documents if (one["kind"], one["metadata"]["name"]) in kinds]
    rest = [one for one in documents if one not in beside]
    page = _SECRETS_PAGE.format(
        name=job.name, namespace=job.config.launch.kubernetes.namespace, key=served.key_secret, tls=served.tls_secret
    )
    return {**({SUPPORT: yaml_text(beside)} if beside else {}), SERVE: yaml_text(rest), SECRETS_PAGE: page}


def _server(job: Job, served: ServedModel) -> Iterator[dict[str, Any]]:
    about = metadata(job, component=COMPONENT)
    selector = {"matchLabels": about["labels"]}
    scales = served.most > served.least
    spec = {
        # With an autoscaler the number is its own: applying the file again would set it back.
        **({} if scales else {"replicas": served.least}),
        "selector": selector,
        # A new version answers before an old one ends.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        # Longer than a pod may take to load its model.
        "progressDeadlineSeconds": 10 * _LOOKS_AT_START + 600,
        "revisionHistoryLimit": 3,
        "template": _pod(job, served),
    }
    yield manifest("apps/v1", "Deployment", about, spec=spec)
    port = {"name": "https", "port": 443, "targetPort": "https"}
    yield manifest("v1", "Service", about, spec={"selector": about["labels"], "ports": [port]})
    if scales:
        yield _autoscaler(job, served)
    if served.most > 1:
        yield manifest("policy/v1", "PodDisruptionBudget", about, spec={"maxUnavailable": 1, "selector": selector})
    if job.config.launch.kubernetes.network_policy:
        # Everything in the cluster reaches the port, and the pods only name servers and the registry's store.
        ingress = [{"ports": [{"port": PORT, "protocol": "TCP"}]}]
        egress = egress_to(job.config.launch.kubernetes.egress_ports)
        yield network_policy(about, about["labels"], ingress, egress)


def _pod(job: Job, served: ServedModel) -> dict[str, Any]:
    launch = job.config.launch
    command = ["headway", "serve", served.model, "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--tls-cert", f"{_SECRETS}/tls.crt", "--tls-key", f"{_SECRETS}/tls.key"]
    command += ["--drain-seconds", str(_DRAIN_SECONDS)]
    if served.is_registered and served.registry is not None:
        command += ["--registry", served.registry]
    plain = {"HOME": "/tmp", "XDG_CACHE_HOME": _CACHE, "PYTHONUNBUFFERED": "1", **launch.environment}
    plain["HEADWAY_API_KEY_FILE"] = f"{_SECRETS}/{_KEY_FILE}"
    container = {
        "name": "headway",
        "command": [*command, *served.options],
        "env": variables(plain),
        "ports": [{"name": "https", "containerPort": PORT}],
        "resources": resources(job, trains=True),
        "securityContext": container_security(),
        "startupProbe": {**_look("/readyz"), "periodSeconds": 10, "failureThreshold": _LOOKS_AT_START},
        "readinessProbe": {**_look("/readyz"), "periodSeconds": 5, "failureThreshold": 2},
        # Much longer than the readiness: a server under load is slow, not dead.
        "livenessProbe": {**_look("/healthz"), "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
    }
    spec = {
        **pod_spec(job, container, list(_volumes(job, served)), launch.grace_seconds or _GRACE_SECONDS),
        **placement(job, trains=False),
        "topologySpreadConstraints": [_spread(job)],
    }
    return {"metadata": {"labels": labels(job, COMPONENT)}, "spec": spec}


def _spread(job: Job) -> dict[str, Any]:
    """Return the rule by which a lost node takes as few pods as possible with it."""
    return {
        "maxSkew": 1,
        "topologyKey": job.config.launch.kubernetes.spread or "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels(job, COMPONENT)},
    }


def _look(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "https", "scheme": "HTTPS"}, "timeoutSeconds": 5}


def _volumes(job: Job, served: ServedModel) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield mounts with their volumes: secrets, what the pod may write, and the claims, for reading only."""
    kubernetes = job.config.launch.kubernetes
    secrets = [
        {"secret": {"name": served.key_secret, "items": [{"key": _KEY_FILE, "path": _KEY_FILE}]}},
        {"secret": {"name": served.tls_secret, "items": [{"key": key, "path": key} for key in ("tls.crt", "tls.key")]}},
    ]
    projected = {"projected": {"defaultMode": 0o440, "sources": secrets}}
    scratch = {"emptyDir": {"sizeLimit": kubernetes.scratch}}
    memory = {"medium": "Memory", "sizeLimit": kubernetes.shared_memory or "1Gi"}
    yield mounted("secrets", _SECRETS, projected, read_only=True)
    yield mounted("cache", _CACHE, scratch)
    yield mounted("tmp", "/tmp", scratch)
    yield mounted("shm", "/dev/shm", {"emptyDir": memory})
    for number, volume in enumerate(kubernetes.volumes):
        yield claimed(number, volume, read_only=True)


def _autoscaler(job: Job, served: ServedModel) -> dict[str, Any]:
    found = None if served.metric is None else _METRIC.fullmatch(served.metric)
    metric: dict[str, Any] = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
    }
    if found is not None:
        target = {"type": "AverageValue", "averageValue": found[2]}
        metric = {"type": "Pods", "pods": {"metric": {"name": found[1]}, "target": target}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.name},
        "minReplicas": served.least,
        "maxReplicas": served.most,
        "metrics": [metric],
        # A pod that is removed has to load its model again, so it is not removed for a short pause.
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
    }
    return manifest("autoscaling/v2", "HorizontalPodAutoscaler", metadata(job, component=COMPONENT), spec=spec)


_SECRETS_PAGE = """# The secrets of {name}

The server needs a key that clients send (`Authorization: Bearer KEY`), and a certificate. No file holds them:

    head -c 32 /dev/urandom | base64 | tr -d '\\n' | \\
        kubectl --namespace {namespace} create secret generic {key} --from-file=api-key=/dev/stdin
    kubectl --namespace {namespace} create secret tls {tls} --cert=tls.crt --key=tls.key

The certificate is for {name}.{namespace}.svc, or for the name that clients use; cert-manager writes such a secret too.
"""


def apply(job: Job, served: ServedModel, folder: Path) -> None:
    """Apply the files of a server, whose secrets must exist.

    Raises:
        ConfigError: a secret is missing, or the API server refuses a file.
    """
    kubernetes = job.config.launch.kubernetes
    kubectl = checked_kubectl(kubernetes.context)
    if (folder / SUPPORT).exists():
        ask_program([*kubectl, "apply", "--filename", str(folder / SUPPORT)])
    for name in (served.key_secret, served.tls_secret):
        if try_program([*kubectl, "get", "secret", name, f"--namespace={kubernetes.namespace}"]).returncode:
            raise ConfigError(
                f"there is no secret {name}",
                where=f"namespace {kubernetes.namespace}",
                fix=f"{folder / SECRETS_PAGE} says how to make it",
            )
    ask_program([*kubectl, "apply", "--filename", str(folder / SERVE)])

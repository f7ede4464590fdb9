"""RayJob of KubeRay (ray.io/v1): a Ray cluster for one run, whose workers are the machines (`launchers.ray`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.kubernetes import Envelope, KubernetesLauncher, with_queue
from headway.clouds.launchers.launcher import State
from headway.clouds.launchers.pods import (
    CONFIG_FOLDER,
    container_security,
    labels,
    manifest,
    metadata,
    mounted,
    pod_template,
    variables,
)
from headway.clouds.launchers.ray_job import ray_command
from headway.core.errors import ConfigError

_TLS_FOLDER = "/etc/ray-tls"
_GROUP = "machines"


def _pod(job: Job, component: str) -> dict[str, Any]:
    """Return the pod of a Ray node: KubeRay starts Ray in it, and Ray the node process."""
    # The lead's address is found by Ray; only machines that hold the token of the cluster may join it.
    template = pod_template(job, None, ["unused"], component)
    pod = template["spec"]
    container = pod["containers"][0]
    del container["command"]
    secret = job.config.launch.rayjob.tls_secret_name
    if secret is not None:
        files = {"RAY_TLS_SERVER_CERT": "tls.crt", "RAY_TLS_SERVER_KEY": "tls.key", "RAY_TLS_CA_CERT": "ca.crt"}
        paths = {name: f"{_TLS_FOLDER}/{file}" for name, file in files.items()}
        container["env"] += variables({"RAY_USE_TLS": "1", **paths})
        mount, volume = mounted("ray-tls", _TLS_FOLDER, {"secret": {"secretName": secret}}, read_only=True)
        container["volumeMounts"].append(mount)
        pod["volumes"].append(volume)
    return template


def _submitter(job: Job) -> dict[str, Any]:
    """Return the pod that submits the job, whose command KubeRay fills in; it needs no data and no secret."""
    template = pod_template(job, None, ["unused"], "submit")
    pod = template["spec"]
    image = pod["containers"][0]["image"]
    pod["containers"] = [
        {
            "name": "ray-job-submitter",
            "image": image,
            "env": variables({"HOME": "/tmp"}),
            "resources": {"requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            "securityContext": container_security(),
            "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        }
    ]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
    return template


def _dashboard_policy(job: Job) -> dict[str, Any]:
    """Return the policy that lets KubeRay in: its operator, and the pod that submits the job, ask the head's dashboard.

    They are no pods of the run, so the run's own policy keeps them out. The dashboard wants the cluster's token.
    """
    submitter = {"podSelector": {"matchLabels": {"job-name": job.name}}}
    operator = {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    port = {"port": job.config.launch.rayjob.dashboard_port, "protocol": "TCP"}
    callers = [submitter, {"namespaceSelector": {}, "podSelector": operator}]
    spec = {
        "podSelector": {"matchLabels": labels(job, "head")},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": callers, "ports": [port]}],
    }
    about = metadata(job, f"{job.name}-dashboard", "head")
    return manifest("networking.k8s.io/v1", "NetworkPolicy", about, spec=spec)


def _documents(job: Job) -> list[dict[str, Any]]:
    settings = job.config.launch.rayjob
    kubernetes = job.config.launch.kubernetes
    most = settings.max_machines or job.machines
    least = job.machines if settings.min_machines is None else settings.min_machines
    head = _pod(job, "head")
    ports = [{"name": "gcs", "containerPort": 6379}, {"name": "dashboard", "containerPort": settings.dashboard_port}]
    if settings.min_machines is not None:
        # The autoscaler, which runs in this pod, asks the API server: KubeRay makes an account with the rights for it.
        del head["spec"]["serviceAccountName"], head["spec"]["automountServiceAccountToken"]
    head["spec"]["containers"][0]["ports"] = [*ports, {"name": "client", "containerPort": 10001}]
    words = ray_command(job, f"{CONFIG_FOLDER}/config.yaml")
    cluster: dict[str, Any] = {
        "rayVersion": settings.ray_version,
        "enableInTreeAutoscaling": settings.min_machines is not None,
        # KubeRay makes a token, and every node and client must show it.
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # No worker of the run on the head: it has no GPU.
            "rayStartParams": {"num-cpus": "0", "dashboard-port": str(settings.dashboard_port)},
            "template": head,
        },
        "workerGroupSpecs": [
            {
                "groupName": _GROUP,
                "replicas": job.machines,
                "minReplicas": least,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": _pod(job, "train"),
            }
        ],
    }
    if settings.min_machines is not None:
        # KubeRay adds its container to the head's pod.
        cluster["autoscalerOptions"] = {"securityContext": container_security()}
    spec = {
        "entrypoint": shlex.join(words),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": min(kubernetes.keep_seconds, 86400),
        # Ray Train restarts machines itself; a new cluster comes when this one is lost.
        "backoffLimit": kubernetes.max_failures,
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": _submitter(job),
        "rayClusterSpec": cluster,
    }
    if job.suite is not None and job.machines == 1 and job.gpus:
        spec["entrypointNumGpus"] = job.gpus  # a bench is no training of Ray Train: it runs where its GPUs are
    policies = [_dashboard_policy(job)] if kubernetes.network_policy else []
    return [*policies, with_queue(job, manifest("ray.io/v1", "RayJob", metadata(job), spec=spec))]


def _state(document: dict[str, Any]) -> tuple[State, str]:
    status = document.get("status") or {}
    deployment = str(status.get("jobDeploymentStatus") or "")
    said = str(status.get("jobStatus") or "")
    words = " ".join(filter(None, (deployment, said, str(status.get("message") or "")))) or "no state yet"
    # A job that has failed may get another cluster: KubeRay then says Retrying, and Failed when it gives up.
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        ends: dict[str, State] = {"SUCCEEDED": "finished", "STOPPED": "cancelled"}
        return ends.get(said, "failed"), words
    return ("running" if said == "RUNNING" else "waiting"), words


class _RayJobLauncher(KubernetesLauncher):
    """The launcher of RayJobs, with what Ray alone asks for."""

    def problems(self, job: Job) -> Iterator[ConfigError]:
        """Yield what the config alone shows to be wrong."""
        yield from super().problems(job)
        most = job.config.launch.rayjob.max_machines
        if most is not None and most < job.machines:
            yield ConfigError(
                f"the run has {job.machines} machines, and its Ray cluster at most {most}",
                where="launch.rayjob.max_machines, --machines",
                fix=f"launch.rayjob.max_machines={job.machines}",
            )


LAUNCHER = _RayJobLauncher(
    Envelope(
        target="rayjob",
        kind="RayJob",
        resource="rayjobs.ray.io",
        documents=_documents,
        read_state=_state,
        # A cluster of its own each time, with Services of that name.
        suffix="-xxxxx-serve-svc",
        shares_secret=False,
        install="helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm/",
    )
)

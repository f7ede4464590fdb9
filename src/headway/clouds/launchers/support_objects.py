"""The objects beside the pods of a job on Kubernetes: accounts, claims, quotas, services and network policies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.pods import labels, manifest, metadata
from headway.config import Config, dump_config
from headway.config.sections.launch import VolumeConfig

#: Scheme, host and port of an address.
_ADDRESS = re.compile(r"\b([a-z][a-z0-9+]*)://(?:[^\s/@'\"]*@)?([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::([0-9]{1,5}))?")
_PORTS = {"http": 80}
_ON_DISK = ("file", "local")
_HERE = ("localhost", "127.0.0.1", "[::1]")
#: Where clouds tell their machines what they are and when they will be taken away, and give them credentials.
_METADATA_ADDRESSES = "169.254.0.0/16"
_METADATA_PORTS = (80, 988)


def support_objects(job: Job, level: str = "restricted") -> Iterator[dict[str, Any]]:
    """Yield the objects that every kind of job needs, in the order in which they are applied.

    Args:
        job: The run.
        level: The level of Pod Security that a namespace gets which is written.
    """
    launch = job.config.launch
    kubernetes = launch.kubernetes
    if kubernetes.create_namespace:
        needs_more = kubernetes.host_network is not None or kubernetes.rdma is not None
        enforced = {"pod-security.kubernetes.io/enforce": "privileged" if needs_more else level}
        yield manifest("v1", "Namespace", {"name": kubernetes.namespace, "labels": enforced})
    if kubernetes.service_account is None:
        account = metadata(job)
        if kubernetes.service_account_annotations:
            account["annotations"] = dict(kubernetes.service_account_annotations)
        # No role is bound to it: a run asks nothing of the API server.
        yield manifest("v1", "ServiceAccount", account, automountServiceAccountToken=False)
    yield manifest("v1", "ConfigMap", metadata(job), data={"config.yaml": job.config_text()})
    for volume in kubernetes.volumes:
        if volume.size is not None:
            yield _claim(job, volume)
    if kubernetes.quota:
        hard = {name: str(amount) for name, amount in kubernetes.quota.items()}
        yield manifest("v1", "ResourceQuota", metadata(job), spec={"hard": hard})
    if job.machines > 1:
        spec = {
            # Headless, and with names of pods that are not ready: machines meet before any of them is.
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(job),
            "ports": [{"name": "lead", "port": launch.port}],
        }
        yield manifest("v1", "Service", metadata(job), spec=spec)
    if kubernetes.network_policy:
        yield _network_policy(job)
    if kubernetes.metrics_port is not None:
        spec = {"selector": {"matchLabels": labels(job)}, "podMetricsEndpoints": [{"port": "metrics"}]}
        yield manifest("monitoring.coreos.com/v1", "PodMonitor", metadata(job), spec=spec)
    if kubernetes.queue is not None and kubernetes.queue.kind == "volcano":
        spec = {"minMember": job.min_machines or job.machines, "queue": kubernetes.queue.name}
        yield manifest("scheduling.volcano.sh/v1beta1", "PodGroup", metadata(job), spec=spec)


def time_slicing_object(pods_per_gpu: int, gpu_resource: str) -> dict[str, Any]:
    """Return the settings of NVIDIA's device plug-in by which several pods share a GPU."""
    import yaml

    sharing = {"timeSlicing": {"resources": [{"name": gpu_resource, "replicas": pods_per_gpu}]}}
    about = {"name": "time-slicing", "namespace": "gpu-operator"}
    settings = yaml.safe_dump({"version": "v1", "sharing": sharing}, sort_keys=False)
    return manifest("v1", "ConfigMap", about, data={"any": settings})


def _claim(job: Job, volume: VolumeConfig) -> dict[str, Any]:
    spec = {
        # One job writes data, then all machines read them.
        "accessModes": ["ReadWriteOnce", "ReadOnlyMany"] if volume.read_only else ["ReadWriteMany"],
        **({} if volume.storage_class is None else {"storageClassName": volume.storage_class}),
        "resources": {"requests": {"storage": volume.size}},
    }
    return manifest("v1", "PersistentVolumeClaim", metadata(job, volume.claim), spec=spec)


def _network_policy(job: Job) -> dict[str, Any]:
    kubernetes = job.config.launch.kubernetes
    # NCCL and gloo choose their ports, so pods of the run reach each other on all of them, and nobody else does.
    run = {key: value for key, value in labels(job).items() if not key.endswith("component")}
    own = {"podSelector": {"matchLabels": run}}
    ingress: list[dict[str, Any]] = [{"from": [own]}]
    if kubernetes.metrics_port is not None:
        ingress.append({"ports": _tcp([kubernetes.metrics_port])})
    ports = dict.fromkeys([*kubernetes.egress_ports, *_ports_in(job.config)])
    egress = [{"to": [own]}, *egress_to(ports)]
    if _watches_a_cloud(job.config):
        egress.append({"to": [{"ipBlock": {"cidr": _METADATA_ADDRESSES}}], "ports": _tcp(_METADATA_PORTS)})
    return network_policy(metadata(job), run, ingress, egress)


def network_policy(
    about: Mapping[str, Any], selected: Mapping[str, str], ingress: Sequence[Any], egress: Sequence[Any]
) -> dict[str, Any]:
    """Return the policy by which pods are reached, and reach others, in these ways alone.

    Args:
        about: Its metadata.
        selected: Labels of the pods.
        ingress: Rules for what reaches them.
        egress: Rules for what they reach.
    """
    spec = {
        "podSelector": {"matchLabels": selected},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", about, spec=spec)


def egress_to(ports: Iterable[int]) -> list[dict[str, Any]]:
    """Return the rules by which a pod reaches name servers, and some ports of any host."""
    names = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    outside = _tcp(ports)
    return [{"ports": names}, *([{"ports": outside}] if outside else [])]


def _tcp(ports: Iterable[int]) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _ports_in(config: Config) -> list[int]:
    """Return the ports of all addresses in a config: of object stores, sources, trackers, alerts and its variables."""
    text = dump_config(config)
    found = dict.fromkeys(
        int(port) if port else _PORTS.get(scheme, 443)
        for scheme, host, port in _ADDRESS.findall(text)
        if scheme not in _ON_DISK and host not in _HERE
    )
    return sorted(port for port in found if 0 < port < 2**16)


def _watches_a_cloud(config: Config) -> bool:
    watched = config.preemption.watch
    return watched == "auto" or any(source in ("aws", "gcp", "azure") for source in watched)

"""Dashboards, alert rules and the exporter as objects of Kubernetes, for kube-prometheus-stack and what is like it.

Grafana's sidecar loads ConfigMaps by their label; the operator of Prometheus reads PrometheusRule and ServiceMonitor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.atomic import atomic_write
from headway.tracking.alert_rules import rules_document
from headway.tracking.dashboards import BOARDS, check_library, dashboard_text

#: Labels and annotation that the sidecar of Grafana's chart looks for.
_DASHBOARD_LABEL = "grafana_dashboard"
_FOLDER_ANNOTATION = "grafana_folder"
_EXPORTER = "headway-exporter"
_TOKEN = "headway-exporter-token"
_PORT = 9400
_USER = 1000
_LABELS = {"app.kubernetes.io/name": "headway", "app.kubernetes.io/component": "exporter"}
_SECRETS = """\
# The exporter needs a certificate and a token, as every server beyond loopback does:
#   openssl req -x509 -newkey rsa:3072 -nodes -days 365 -keyout tls.key -out tls.crt \\
#     -subj /CN=headway-exporter -addext subjectAltName=DNS:headway-exporter.{namespace}.svc
#   kubectl --namespace {namespace} create secret tls headway-exporter --cert tls.crt --key tls.key
#   kubectl --namespace {namespace} create secret generic headway-exporter-token \\
#     --from-literal token=$(openssl rand -hex 32)
"""


@dataclass(frozen=True)
class Cluster:
    """Where the objects go, and what they must be called to be found."""

    namespace: str
    """That of the runs: the exporter mounts their claim."""
    release: str = ""
    """The Helm release of kube-prometheus-stack, by whose name its Prometheus selects objects."""
    image: str | None = None
    """Image with Headway, for the exporter."""
    claim: str | None = None
    """PersistentVolumeClaim with the run directories."""


def export_dashboards(folder: Path, cluster: Cluster) -> list[Path]:
    """Write every dashboard as a ConfigMap, in one file.

    Raises:
        ConfigError: the library for dashboards is not installed.
        OSError: the file cannot be written.
    """
    check_library()
    return [_write(folder / "headway-dashboards.yaml", "", map(_dashboard, BOARDS), cluster)]


def export_alerts(folder: Path, cluster: Cluster) -> list[Path]:
    """Write the rules, the exporter with its monitor, and values for the charts of Prometheus and of DCGM's exporter.

    Raises:
        ConfigError: only one of image and claim is given.
        OSError: a file cannot be written.
    """
    if (cluster.image is None) != (cluster.claim is None):
        raise ConfigError(
            "the exporter needs an image with Headway and the claim with the runs",
            where="--image, --claim",
            fix="give both, or neither where you run `headway top --serve` in pods of your own",
        )
    rule = _object("monitoring.coreos.com/v1", "PrometheusRule", "headway-alerts", rules_document())
    values = {"kube-prometheus-stack": _stack_values(), "dcgm-exporter": _dcgm_values(cluster)}
    return [
        _write(folder / "headway-alerts-rule.yaml", "", [rule], cluster),
        _write(folder / f"{_EXPORTER}.yaml", _SECRETS.format(namespace=cluster.namespace), _exporter(cluster), cluster),
        *(_write_values(folder, chart, found) for chart, found in values.items()),
    ]


def _dashboard(board: str) -> dict[str, Any]:
    name = f"headway-{board}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{name}-dashboard",
            "labels": {_DASHBOARD_LABEL: "1"},
            "annotations": {_FOLDER_ANNOTATION: "Headway"},
        },
        "data": {f"{name}.json": dashboard_text(board)},
    }


def _exporter(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Yield the exporter, if its image is known, its service, and the monitor that has Prometheus scrape it."""
    if cluster.image is not None:
        spec = {"selector": {"matchLabels": _LABELS}, "strategy": {"type": "Recreate"}, "template": _pod(cluster)}
        yield _object("apps/v1", "Deployment", _EXPORTER, {"replicas": 1, **spec})
    port = {"name": "metrics", "port": _PORT, "targetPort": "metrics"}
    yield _object("v1", "Service", _EXPORTER, {"selector": _LABELS, "ports": [port]})
    endpoint = {
        "port": "metrics",
        "scheme": "https",
        "interval": "30s",
        "honorLabels": True,  # `job` and `machine` are those of the runs
        "authorization": {"credentials": {"name": _TOKEN, "key": "token"}},
        "tlsConfig": {
            "ca": {"secret": {"name": _EXPORTER, "key": "tls.crt"}},
            "serverName": f"{_EXPORTER}.{cluster.namespace}.svc",
        },
    }
    monitor = {"selector": {"matchLabels": _LABELS}, "endpoints": [endpoint]}
    yield _object("monitoring.coreos.com/v1", "ServiceMonitor", _EXPORTER, monitor)


def _pod(cluster: Cluster) -> dict[str, Any]:
    command = ["headway", "top", "/runs", "--serve", f"0.0.0.0:{_PORT}"]
    token = {"valueFrom": {"secretKeyRef": {"name": _TOKEN, "key": "token"}}}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "runs": ("/runs", {"persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}}),
        "tls": ("/etc/headway", {"secret": {"secretName": _EXPORTER, "defaultMode": 0o440}}),
        "tmp": ("/tmp", {"emptyDir": {"sizeLimit": "1Gi"}}),
    }
    container = {
        "name": "exporter",
        "image": cluster.image,
        "command": [*command, "--tls-cert", "/etc/headway/tls.crt", "--tls-key", "/etc/headway/tls.key"],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "HEADWAY_METRICS_TOKEN", **token}],
        "ports": [{"name": "metrics", "containerPort": _PORT}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": name, "mountPath": place, "readOnly": name != "tmp"} for name, (place, _) in volumes.items()
        ],
    }
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    spec = {
        "automountServiceAccountToken": False,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    return {"metadata": {"labels": _LABELS}, "spec": spec}


def _stack_values() -> dict[str, Any]:
    dashboards = {
        "enabled": True,
        "label": _DASHBOARD_LABEL,
        "labelValue": "1",
        "searchNamespace": "ALL",
        "folderAnnotation": _FOLDER_ANNOTATION,
        "provider": {"foldersFromFilesStructure": True},
    }
    # Otherwise the PodMonitors of `launch.kubernetes.metrics_port`, which know no release, are not selected.
    selectors = {f"{kind}SelectorNilUsesHelmValues": False for kind in ("rule", "serviceMonitor", "podMonitor")}
    return {"grafana": {"sidecar": {"dashboards": dashboards}}, "prometheus": {"prometheusSpec": selectors}}


def _dcgm_values(cluster: Cluster) -> dict[str, Any]:
    # A machine of a run is named by its host name, which is its pod's name without the five random characters.
    machine = {"sourceLabels": ["pod"], "regex": "(.+)-[0-9a-z]{5}", "targetLabel": "machine", "replacement": "$1"}
    monitor = {"enabled": True, "honorLabels": True, "additionalLabels": {"release": cluster.release}}
    return {"serviceMonitor": {**monitor, "metricRelabelings": [machine]}}


def _object(version: str, kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": dict(_LABELS)}, "spec": spec}


def _write(path: Path, comment: str, objects: Any, cluster: Cluster) -> Path:
    import yaml

    def placed(one: dict[str, Any]) -> dict[str, Any]:
        about = {**one["metadata"], "namespace": cluster.namespace}
        if one["apiVersion"].startswith("monitoring."):
            about["labels"] = {**about["labels"], "release": cluster.release}
        return {**one, "metadata": about}

    with atomic_write(path, "w") as file:
        file.write(f"# Written by `headway`: kubectl apply --server-side --filename {path.name}\n{comment}")
        # Through JSON: what several objects share would become anchors.
        documents = [json.loads(json.dumps(placed(one))) for one in objects]
        yaml.safe_dump_all(documents, file, sort_keys=False, width=1000)
    return path


def _write_values(folder: Path, chart: str, values: Mapping[str, Any]) -> Path:
    import yaml

    path = folder / f"{chart}-values.yaml"
    with atomic_write(path, "w") as file:
        file.write(f"# Written by `headway`, for the chart {chart}: helm upgrade ... --values {path.name}\n")
        yaml.safe_dump(values, file, sort_keys=False)
    return path

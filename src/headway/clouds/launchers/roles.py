"""Roles for people who use a namespace of Kubernetes: viewers, trainers and operators, each with the least rights.

What a trainer may do follows from the objects of a launch, and from the calls of `kubectl` that it makes. Pods of a run
have no rights at all (`pods.support_objects`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.kubernetes import KEPT_KINDS, KubernetesLauncher
from headway.clouds.launchers.pods import manifest, secret_name

#: A kind of object: its group, and its plural.
Resource = tuple[str, str]

_LOOK = ("get", "list", "watch")
_MANAGE = ("create", "delete", "get", "list", "patch", "watch")
_RBAC = "rbac.authorization.k8s.io"
_FOLLOWED: tuple[Resource, ...] = (("", "events"), ("", "pods"), ("", "pods/log"))
_CONFIG: Resource = ("", "configmaps")


def role_objects(launcher: KubernetesLauncher, job: Job) -> list[dict[str, Any]]:
    """Return the roles of a run's namespace, and their bindings to the groups `headway-viewers`, `headway-trainers` and
    `headway-operators`.

    A viewer follows runs: their objects, pods and logs, but neither configs nor secrets. A trainer also starts and
    removes them, and reads no other secret than the one that the machines of this run share. An operator also manages
    what outlives runs (volumes, quotas), and removes pods.

    Args:
        launcher: The launcher of the kind of job that is used there.
        job: A run.
    """
    namespace = job.config.launch.kubernetes.namespace
    files = launcher.files(job)
    documents = [one for name, text in files.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    own = [one for one in documents if one["metadata"].get("namespace") == namespace]
    kept = {_resource(one["apiVersion"], one["kind"]) for one in own if one["kind"] in KEPT_KINDS}
    plural, _, group = launcher.envelope.resource.partition(".")
    made = {_resource(one["apiVersion"], one["kind"]) for one in own} - kept
    made |= {(group, plural), ("batch", "jobs")}
    follow = list(_rules({*made, *kept, *_FOLLOWED} - {_CONFIG}, _LOOK))
    start = [*follow, *_rules(made, _MANAGE)]
    if job.machines > 1 and launcher.envelope.shares_secret:
        shared = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["delete", "get"]}
        start += [*_rules({("", "secrets")}, ["create"]), {**shared, "resourceNames": [secret_name(job)]}]
    operate = [*start, *_rules(kept, _MANAGE), *_rules({("", "pods")}, ["delete"])]
    rights = {"viewer": follow, "trainer": start, "operator": operate}
    return [document for name, rules in rights.items() for document in _role(namespace, name, rules)]


def _resource(version: str, kind: str) -> Resource:
    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return version.rpartition("/")[0], plural.lower()


def _rules(resources: Iterable[Resource], verbs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one rule per group."""
    by_group: dict[str, list[str]] = {}
    for group, plural in sorted(resources):
        by_group.setdefault(group, []).append(plural)
    for group, plurals in by_group.items():
        yield {"apiGroups": [group], "resources": plurals, "verbs": list(verbs)}


def _role(namespace: str, name: str, rules: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a role, and its binding to a group of people."""
    about = {
        "name": f"headway-{name}",
        "namespace": namespace,
        "labels": {"app.kubernetes.io/managed-by": "headway"},
    }
    yield manifest(f"{_RBAC}/v1", "Role", about, rules=rules)
    role = {"apiGroup": _RBAC, "kind": "Role", "name": about["name"]}
    people = {"apiGroup": _RBAC, "kind": "Group", "name": f"headway-{name}s"}
    yield manifest(f"{_RBAC}/v1", "RoleBinding", about, roleRef=role, subjects=[people])

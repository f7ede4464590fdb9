"""The rules of Kubernetes' Pod Security Standards, by which a namespace admits pods, for the tests of manifests.

Written from the standards' page (kubernetes.io/docs/concepts/security/pod-security-standards), version 1.37.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Capabilities that the level `baseline` lets a container add, and `restricted`.
_BASELINE_CAPABILITIES = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
    "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
_RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
_SAFE_SYSCTLS = ("kernel.shm_rmid_forced", "net.ipv4.", "net.ipv6.")


def refusals(pod: dict[str, Any], level: str) -> list[str]:
    """What a namespace of this level, `baseline` or `restricted`, says of the spec of a pod."""
    found = list(_baseline(pod))
    return [*found, *_restricted(pod)] if level == "restricted" else found


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [container for kind in kinds for container in pod.get(kind, ())]


def _contexts(pod: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "pod", pod.get("securityContext", {})
    for container in _containers(pod):
        yield container["name"], container.get("securityContext", {})


def _baseline(pod: dict[str, Any]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield key
    yield from (f"volume {volume['name']}: hostPath" for volume in pod.get("volumes", ()) if "hostPath" in volume)
    for name, context in _contexts(pod):
        if context.get("privileged"):
            yield f"{name}: privileged"
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            yield f"{name}: seccompProfile"
        if context.get("procMount", "Default") != "Default":
            yield f"{name}: procMount"
        added = set(context.get("capabilities", {}).get("add", ()))
        if added - _BASELINE_CAPABILITIES:
            yield f"{name}: capabilities.add"
        for sysctl in context.get("sysctls", ()):
            if not sysctl["name"].startswith(_SAFE_SYSCTLS):
                yield f"{name}: sysctls"
    for container in _containers(pod):
        if any(port.get("hostPort") for port in container.get("ports", ())):
            yield f"{container['name']}: hostPort"


def _restricted(pod: dict[str, Any]) -> Iterator[str]:
    for volume in pod.get("volumes", ()):
        if not volume.keys() - {"name"} <= _RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}: kind"
    whole = pod.get("securityContext", {})
    for container in _containers(pod):
        name, context = container["name"], container.get("securityContext", {})
        capabilities = context.get("capabilities", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation"
        if "ALL" not in capabilities.get("drop", ()):
            yield f"{name}: capabilities.drop"
        if not set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"}:
            yield f"{name}: capabilities.add"
        if context.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
            yield f"{name}: runAsNonRoot"
        if context.get("runAsUser", whole.get("runAsUser")) == 0:
            yield f"{name}: runAsUser"
        profile = context.get("seccompProfile", whole.get("seccompProfile", {})).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: seccompProfile"

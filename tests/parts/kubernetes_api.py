"""A stand-in for the API server of Kubernetes, as a program: `python kubernetes_api.py PORT`.

It keeps objects in memory by `kmock`, without schemas, schedulers or kubelets. It has a process and an environment of
its own, since `kmock` brings a plug-in for pytest.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp.web
import kmock

#: Resources beyond those that `kmock` has.
CUSTOM = (
    ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    ("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob"),
    ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime"),
    ("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
    ("ray.io", "v1", "rayjobs", "RayJob"),
)
PLAIN = (
    ("", "v1", "pods", "Pod"), ("", "v1", "nodes", "Node"), ("", "v1", "configmaps", "ConfigMap"),
    ("", "v1", "services", "Service"), ("", "v1", "serviceaccounts", "ServiceAccount"), ("", "v1", "secrets", "Secret"),
    ("", "v1", "namespaces", "Namespace"), ("batch", "v1", "jobs", "Job"),
    ("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"), ("apps", "v1", "deployments", "Deployment"),
    ("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    ("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    ("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"),
)  # fmt: skip
CLUSTER = ("Node", "Namespace", "CustomResourceDefinition")
VERBS = ["get", "list", "watch", "create", "patch", "update", "delete"]


class Api(kmock.KubernetesEmulator):
    """The emulator, whose lists have the kind that `kubectl` asks for."""

    async def _serve_list(self, request: kmock.Request) -> object:
        found = await super()._serve_list(request)
        group, version, plural = request.resource.group, request.resource.version, request.resource.plural
        kind = next(kind for *key, kind in (*PLAIN, *CUSTOM) if tuple(key) == (group, version, plural))
        return {"kind": f"{kind}List", "apiVersion": f"{group}/{version}".lstrip("/"), **found}

    async def _render_error(self, exc: Exception) -> object:
        """Answer with the reasons that `kubectl` knows, so that `--ignore-not-found` works."""
        if getattr(exc, "status", None) != 404:
            return await super()._render_error(exc)
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
        return aiohttp.web.json_response({**status, "metadata": {}, "message": "not found"}, status=404)


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    async with Api() as api, kmock.Server(api, port=port):
        for group, version, plural, kind in (*PLAIN, *CUSTOM):
            api.resources[group, version, plural] = kmock.ResourceInfo(
                kind=kind, singular=kind.lower(), namespaced=kind not in CLUSTER, verbs={*VERBS}
            )
        core = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "kind": kind,
                "namespaced": kind not in CLUSTER,
                "verbs": VERBS,
            }
            for group, _, plural, kind in PLAIN
            if not group
        ]
        api["get /api/v1"] << {"kind": "APIResourceList", "groupVersion": "v1", "resources": core}
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

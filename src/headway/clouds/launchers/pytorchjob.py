"""PyTorchJob of Kubeflow's Training Operator (kubeflow.org/v1): a master and workers, machines 0 and 1, 2, ...

The operator restarts a pod by its exit code: from 128 on it comes back, below that it is final. So the code 75 leaves
the pod as 143, which a shell does. The shell also passes SIGTERM on, and takes away the variables by which the operator
describes each pod as one worker of torchrun.
"""

from __future__ import annotations

import shlex
from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.kubernetes import (
    Envelope,
    KubernetesLauncher,
    state_by_condition,
    true_conditions,
    with_queue,
)
from headway.clouds.launchers.launcher import State
from headway.clouds.launchers.pods import CONFIG_FOLDER, manifest, metadata, pod_template
from headway.core.coordination.launch_variables import NODE, OF_A_WORKER
from headway.core.errors import Preempted

#: The operator looks for a container of this name.
_CONTAINER = "pytorch"
_ANNOUNCE = f"export {NODE}=$RANK\n"
_SCRIPT = """\
{node}unset {of_a_worker}
{command} &
child=$!
trap 'kill -TERM $child' TERM
# A signal ends `wait` early, so it is called until the process is gone; the last call gives its exit code.
while wait $child; code=$?; kill -0 $child 2>/dev/null; do :; done
[ $code -ne {again} ] || exit 143
exit $code
"""


def _replica(job: Job, count: int) -> dict[str, Any]:
    node = _ANNOUNCE if job.machines > 1 else ""
    unset = " ".join(OF_A_WORKER)
    command = shlex.join(job.command(f"{CONFIG_FOLDER}/config.yaml"))
    script = _SCRIPT.format(node=node, of_a_worker=unset, command=command, again=Preempted.exit_code)
    # The operator has its own names for pods, and a Service for each.
    template = pod_template(job, f"{job.name}-master-0", ["/bin/sh", "-c", script], container=_CONTAINER)
    del template["spec"]["restartPolicy"]
    return {"replicas": count, "restartPolicy": "ExitCode", "template": template}


def _documents(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.config.launch.kubernetes
    replicas = {"Master": _replica(job, 1)}
    if job.machines > 1:
        replicas["Worker"] = _replica(job, job.machines - 1)
    spec = {
        "runPolicy": {
            "cleanPodPolicy": "None",
            "backoffLimit": kubernetes.max_failures * job.machines,
            "ttlSecondsAfterFinished": kubernetes.keep_seconds,
        },
        "pytorchReplicaSpecs": replicas,
    }
    return [with_queue(job, manifest("kubeflow.org/v1", "PyTorchJob", metadata(job), spec=spec))]


def _state(document: dict[str, Any]) -> tuple[State, str]:
    known = state_by_condition(document, {"Succeeded": "finished", "Failed": "failed", "Running": "running"})
    if known is not None:
        return known
    return "waiting", ", ".join(one["type"] for one in true_conditions(document)) or "no state yet"


LAUNCHER = KubernetesLauncher(
    Envelope(
        target="pytorchjob",
        kind="PyTorchJob",
        resource="pytorchjobs.kubeflow.org",
        documents=_documents,
        read_state=_state,
        suffix="-worker-{last}",
        # Workers wait for the master in a container that the operator adds, which does not give up its capabilities.
        pod_security="baseline",
        container=_CONTAINER,
        install="kubectl apply --server-side -k"
        " 'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'",
    )
)

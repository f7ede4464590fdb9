"""Kubeflow Trainer (trainer.kubeflow.org): a TrainJob, with a TrainingRuntime of its own that holds the pod.

The runtime has the plain policy, not the one for PyTorch: that one starts workers through torchrun, and here the node
process starts and supervises them.
"""

from __future__ import annotations

from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.jobset import jobset_spec, jobset_state
from headway.clouds.launchers.kubernetes import Envelope, KubernetesLauncher, with_queue
from headway.clouds.launchers.pods import manifest, metadata

_API = "trainer.kubeflow.org/v1alpha1"
#: The name that the controller expects of the Job that trains and of its container, and the label of that Job.
_NODE = "node"
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def _documents(job: Job) -> list[dict[str, Any]]:
    # The controller names the JobSet like the TrainJob.
    spec = jobset_spec(job, job.name, _NODE, container=_NODE)
    spec["replicatedJobs"][0]["template"]["metadata"] = {"labels": _STEP}
    runtime = {"mlPolicy": {"numNodes": job.machines}, "template": {"spec": spec}}
    run = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {"numNodes": job.machines},
    }
    return [
        manifest(_API, "TrainingRuntime", metadata(job), spec=runtime),
        with_queue(job, manifest(_API, "TrainJob", metadata(job), spec=run)),
    ]


LAUNCHER = KubernetesLauncher(
    Envelope(
        target="trainjob",
        kind="TrainJob",
        resource="trainjobs.trainer.kubeflow.org",
        documents=_documents,
        read_state=jobset_state,
        suffix=f"-{_NODE}-0-{{last}}-xxxxx",
        container=_NODE,
        install="kubectl apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.1.0'",
    )
)

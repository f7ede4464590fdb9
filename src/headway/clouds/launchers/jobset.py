"""JobSet (jobset.x-k8s.io): the indexed Job in a set, which a failed machine can restart as a whole."""

from __future__ import annotations

from typing import Any

from headway.clouds.launchers.job import Job
from headway.clouds.launchers.kubernetes import Envelope, KubernetesLauncher, job_spec, state_by_condition, with_queue
from headway.clouds.launchers.launcher import State
from headway.clouds.launchers.pods import CONTAINER, manifest, metadata

#: How an administrator installs the controller.
INSTALL = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)
_JOB = "train"
#: What a condition that holds says about the job.
_STATES: dict[str, State] = {
    "Completed": "finished",
    "Complete": "finished",
    "Failed": "failed",
    "Suspended": "waiting",
}


def jobset_spec(job: Job, set_name: str, replicated_job: str = _JOB, container: str = CONTAINER) -> dict[str, Any]:
    """Return the spec of a JobSet with one Job of all machines.

    Args:
        job: The run.
        set_name: Name that the JobSet will have; names of its pods follow from it.
        replicated_job: Name of the Job in it.
        container: Name of the container of its pods.
    """
    spec = job_spec(job, f"{set_name}-{replicated_job}-0-0.{job.name}", container)
    return {
        # The JobSet gives its pods host names and the subdomain.
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        # The Job restarts its own pods; when it has failed, its exit code was final or its failures are used up.
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": replicated_job, "replicas": 1, "template": {"spec": spec}}],
    }


def _documents(job: Job) -> list[dict[str, Any]]:
    spec = jobset_spec(job, job.name)
    spec["ttlSecondsAfterFinished"] = job.config.launch.kubernetes.keep_seconds
    return [with_queue(job, manifest("jobset.x-k8s.io/v1alpha2", "JobSet", metadata(job), spec=spec))]


def jobset_state(document: dict[str, Any]) -> tuple[State, str]:
    """Return the state of a JobSet, or of a TrainJob, which has the same conditions but for their names."""
    known = state_by_condition(document, _STATES)
    if known is not None:
        return known
    status = document.get("status") or {}
    jobs = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
    ready, active = (sum(one.get(name) or 0 for one in jobs) for name in ("ready", "active"))
    return ("running" if ready else "waiting"), f"{active} jobs active, {ready} ready"


JOBSET = Envelope(
    target="jobset",
    kind="JobSet",
    resource="jobsets.jobset.x-k8s.io",
    documents=_documents,
    read_state=jobset_state,
    suffix=f"-{_JOB}-0-{{last}}-xxxxx",
    install=INSTALL,
)
LAUNCHER = KubernetesLauncher(JOBSET)

"""Manifests of kinds that controllers bring, read by the models that their projects publish; RayJob has none."""

from __future__ import annotations

import copy

import pytest

from headway.clouds.launchers.launcher import find_launcher
from support.launchers import documents, job, read_by_their_models
from support.parts_table import SCHEMAS

pytestmark = pytest.mark.parts(SCHEMAS)

_RICH = (
    "launch.kubernetes.queue={kind: kueue, name: team}", "launch.kubernetes.memory=900Gi", "launch.kubernetes.cpus=90",
    "launch.kubernetes.spread=kubernetes.io/hostname", "launch.kubernetes.pack=topology.kubernetes.io/zone",
    "launch.kubernetes.tolerations=[{key: nvidia.com/gpu, effect: NoSchedule}]", "launch.kubernetes.metrics_port=9400",
    "launch.kubernetes.rdma={resource: rdma/hca, reason: the fabric is InfiniBand}",
    "launch.kubernetes.host_network={reason: the fabric is the host's}", "launch.kubernetes.pull_secret_names=[pull]",
    "launch.kubernetes.secret_names=[storage]", "launch.kubernetes.priority_class=high",
    "launch.kubernetes.shared_memory=64Gi",
)  # fmt: skip
_KINDS = {"jobset": ["JobSet"], "trainjob": ["TrainingRuntime", "TrainJob"], "pytorchjob": ["PyTorchJob"]}


@pytest.mark.parametrize("target", list(_KINDS))
def test_the_models_of_a_project_know_every_key_of_its_manifests(target: str) -> None:
    manifests = [
        document
        for overrides in ((), _RICH)
        for machines in (1, 3)
        for document in documents(find_launcher(target).files(job(*overrides, machines=machines)))
        if document["kind"] in _KINDS[target]
    ]
    assert len(manifests) == 4 * len(_KINDS[target])
    misspelt = copy.deepcopy(manifests[0])
    misspelt["spec"]["sepc"] = 1
    *found, odd = read_by_their_models([*manifests, misspelt])
    assert found == [[]] * len(manifests)
    assert odd

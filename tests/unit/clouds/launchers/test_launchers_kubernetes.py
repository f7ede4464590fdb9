"""Manifests: valid for Kubernetes, with the rights and the answers to exit codes that a run needs; and `kubectl`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.clouds.launchers.job import smoke_job
from headway.clouds.launchers.kubernetes import LAUNCHER, SUPPORT, TRAIN
from headway.clouds.launchers.launcher import LAUNCHERS, find_launcher
from headway.core.errors import ConfigError
from support.launchers import Programs, documents, job

TARGETS = ("kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob")
ENVELOPES = TARGETS[1:]
#: Nearly every key of the section.
EVERYTHING = (
    "launch.kubernetes={namespace: team, create_namespace: true, service_account_annotations: {a.b/role: r},"
    " pull_secret_names: [registry], secret_names: [s3], shared_memory: 8Gi, cpus: 90, memory: 900Gi,"
    " time_slicing: 4, priority_class: high, node_selector: {pool: gpu}, spread: kubernetes.io/hostname,"
    " pack: topology.kubernetes.io/zone, tolerations: [{key: gpu, effect: NoSchedule}, {key: team, value: a}],"
    " queue: {kind: volcano, name: q}, quota: {pods: 10, requests.nvidia.com/gpu: 16},"
    " host_network: {reason: EFA needs the network of the node},"
    " rdma: {resource: rdma/hca, reason: InfiniBand between the machines}, metrics_port: 9400,"
    " volumes: [{claim: runs, mount: /runs, size: 1Ti, storage_class: nfs}, {claim: data, mount: /data,"
    " read_only: true, size: 10Gi}]}",
    "launch.environment={NCCL_DEBUG: WARN}",
)


def validate(document: dict[str, Any]) -> bool:
    """Check a manifest against the schema of its kind; says whether there is one."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    group = document["apiVersion"].rpartition("/")[0]
    if "." in group and not re.fullmatch(r"\w+\.k8s\.io", group):
        return False
    kubernetes_validate.validate(document, "1.37", strict=True)
    return True


@pytest.mark.parametrize("overrides", [(), EVERYTHING], ids=["least", "everything"])
def test_every_manifest_is_valid(overrides: tuple[str, ...]) -> None:
    without = {document["kind"] for document in documents(LAUNCHER.files(job(*overrides))) if not validate(document)}
    assert without <= {"PodMonitor", "PodGroup"}


def test_a_misspelt_key_does_not_pass() -> None:
    plain = documents(LAUNCHER.files(job()))[-1]
    plain["spec"]["paralelism"] = 2
    with pytest.raises(Exception, match="paralelism"):
        validate(plain)


@pytest.mark.parametrize("target", ENVELOPES)
def test_pods_within_every_envelope_are_those_of_a_plain_job(target: str) -> None:
    """The pod in an envelope without schema is checked as the pod of a Job, which has one."""
    found = []
    for document in documents({TRAIN: find_launcher(target).files(job(*EVERYTHING))[TRAIN]}):
        found += [template for template in templates(document) if "containers" in template["spec"]]
    assert len(found) == (2 if target in ("pytorchjob", "rayjob") else 1)
    for template in found:
        template["spec"].setdefault("restartPolicy", "Never")
        about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
        container = template["spec"]["containers"][0]
        assert validate({**about, "spec": {"template": template}}), target
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert template["spec"]["automountServiceAccountToken"] is False
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in template["spec"]["volumes"]


def templates(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [found for item in value for found in templates(item)]
    if not isinstance(value, dict):
        return []
    here = [value["template"]] if "spec" in (value.get("template") or {}) else []
    return here + [found for item in value.values() for found in templates(item)]


def test_machines_meet_at_the_first_pod_and_exit_codes_are_answered() -> None:
    files = LAUNCHER.files(job("launch.port=30000"))
    plain = yaml.safe_load(files[TRAIN])
    spec, pod = plain["spec"], plain["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    final, again, evicted = spec["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4, 5, 6, 7])
    assert (again["action"], again["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    environment = {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["containers"][0]["env"]}
    assert environment["HEADWAY_MACHINES"] == "2" and environment["HEADWAY_LEAD"] == "tiny-run-0.tiny-run:30000"
    assert environment["HEADWAY_SECRET"] == {"secretKeyRef": {"name": "tiny-run-machines", "key": "HEADWAY_SECRET"}}
    assert environment["HEADWAY_LISTEN"] == {"fieldRef": {"fieldPath": "status.podIP"}}, "its name is known later"
    (service,) = [document for document in documents(files) if document["kind"] == "Service"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"] == "tiny-run"
    assert service["spec"]["selector"].items() <= plain["spec"]["template"]["metadata"]["labels"].items()
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_kuberay_reaches_the_dashboard_of_its_cluster_through_the_network_policy() -> None:
    """Its operator, and the pod that submits the job, are no pods of the run, which alone are let in otherwise."""
    policy, run = documents({TRAIN: find_launcher("rayjob").files(job())[TRAIN]})
    assert validate(policy)
    head = run["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= head.items()
    (rule,) = policy["spec"]["ingress"]
    assert [one["podSelector"]["matchLabels"] for one in rule["from"]] == [
        {"job-name": "tiny-run"},
        {"app.kubernetes.io/component": "kuberay-operator"},
    ]
    assert rule["ports"] == [{"port": 8265, "protocol": "TCP"}]
    without = find_launcher("rayjob").files(job("launch.kubernetes.network_policy=false"))
    assert "NetworkPolicy" not in "".join(without.values())


def test_only_a_head_with_an_autoscaler_has_a_token_of_the_api_server() -> None:
    for settings, scales in ((), False), (("launch.rayjob.min_machines=1",), True):
        *_, run = documents({TRAIN: find_launcher("rayjob").files(job(*settings))[TRAIN]})
        head, machine = (template["spec"] for template in templates(run))
        assert ("automountServiceAccountToken" not in head) is ("serviceAccountName" not in head) is scales
        assert machine["automountServiceAccountToken"] is False and machine["serviceAccountName"] == "tiny-run"


def test_the_run_has_no_rights_and_no_secret_is_written() -> None:
    files = LAUNCHER.files(job())
    kinds = [document["kind"] for document in documents(files)]
    assert "ServiceAccount" in kinds and not {"Role", "RoleBinding", "ClusterRole", "Secret"} & set(kinds)
    assert "HEADWAY_SECRET: " not in "".join(files.values())


def test_the_network_is_closed_but_for_the_run_names_and_object_storage() -> None:
    (policy,) = [one for one in documents(LAUNCHER.files(job())) if one["kind"] == "NetworkPolicy"]
    own = {"app.kubernetes.io/name": "headway", "app.kubernetes.io/instance": "tiny-run"}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    ports = [port["port"] for rule in policy["spec"]["egress"] if "to" not in rule for port in rule["ports"]]
    assert ports == [53, 53, 443]


def test_the_config_travels_whole(tmp_path: Path) -> None:
    from headway.config import load_config

    given = job("train.steps=7")
    (found,) = [one for one in documents(LAUNCHER.files(given)) if one["kind"] == "ConfigMap"]
    (tmp_path / "config.yaml").write_text(found["data"]["config.yaml"])
    assert load_config(tmp_path / "config.yaml") == given.config


def test_kueue_holds_the_job_and_volcano_the_pods() -> None:
    kueue = yaml.safe_load(LAUNCHER.files(job("launch.kubernetes.queue={kind: kueue, name: q}"))[TRAIN])
    assert kueue["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    files = LAUNCHER.files(job("launch.kubernetes.queue={kind: volcano, name: q}"))
    (group,) = [one for one in documents(files) if one["kind"] == "PodGroup"]
    template = yaml.safe_load(files[TRAIN])["spec"]["template"]
    assert group["spec"] == {"minMember": 2, "queue": "q"} and template["spec"]["schedulerName"] == "volcano"
    assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]


def test_a_patch_is_merged_last_and_one_that_changes_nothing_is_refused() -> None:
    patch = (
        "launch.kubernetes.patch=[{kind: Job, metadata: {name: tiny-run}, spec: {backoffLimit: 1, completions: null,"
        " template: {spec: {containers: [{name: headway, imagePullPolicy: Always}]}}}},"
        " {apiVersion: v1, kind: LimitRange, metadata: {name: own}, spec: {limits: []}}]"
    )
    files = LAUNCHER.files(job(patch))
    spec = yaml.safe_load(files[TRAIN])["spec"]
    assert spec["backoffLimit"] == 1 and "completions" not in spec
    (container,) = spec["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == "Always" and container["image"] == "registry/headway:1"
    assert "LimitRange" in files[SUPPORT]
    with pytest.raises(ConfigError, match="no CronJob"):
        LAUNCHER.files(job("launch.kubernetes.patch=[{kind: CronJob}]"))


def test_a_smoke_job_is_one_gpu_and_a_small_model() -> None:
    smoke = smoke_job(job("model.preset=8b", "parallel.tensor=8").config)
    plain = yaml.safe_load(LAUNCHER.files(smoke)[TRAIN])
    assert plain["metadata"]["name"] == "tiny-run-smoke" and plain["spec"]["completions"] == 1
    assert plain["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert smoke.config.train.steps == 10 and smoke.config.model.preset == "4m"


def test_a_training_operator_brings_75_back_as_143_and_sees_no_worker_of_torchrun() -> None:
    (found,) = documents({"a.yaml": find_launcher("pytorchjob").files(job())[TRAIN]})
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
    script = replicas["Worker"]["template"]["spec"]["containers"][0]["command"][-1]
    assert (
        replicas["Master"]["restartPolicy"] == "ExitCode"
        and "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT" in script
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("launch.image=null",), "needs an image"),
        (("name=Tiny_Run",), "cannot name the objects"),
        (("runs=/elsewhere",), "no shared volume and there is no remote tier"),
        (("data.store=/elsewhere/store",), "on no volume that all machines mount"),
        (("launch.kubernetes.quota={pods: 1}",), "allows 1"),
        (("launch.gpus_per_machine=4",), "a machine has 4 GPUs and 8 workers"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(overrides: tuple[str, ...], says: str) -> None:
    assert not list(LAUNCHER.problems(job()))
    assert says in "\n".join(problem.what for problem in LAUNCHER.problems(job(*overrides)))


def test_a_grace_shorter_than_the_last_save_is_refused() -> None:
    assert job(save_seconds=100.0).grace_seconds == 300 and job(save_seconds=1.0).grace_seconds == 120
    (problem,) = LAUNCHER.problems(job("launch.grace_seconds=60", save_seconds=100.0))
    assert "a stop would lose it" in problem.what
    assert not list(LAUNCHER.problems(job("launch.grace_seconds=160", save_seconds=100.0)))


def test_the_remote_tier_stands_for_a_shared_volume() -> None:
    remote = ("runs=/elsewhere", "checkpoint.remote.url=s3://bucket/runs")
    assert not list(LAUNCHER.problems(job(*remote)))


# kubectl --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    programs = Programs(tmp_path, monkeypatch, "kubectl")
    node = {"status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    programs.answer("nodes", stdout=json.dumps({"items": [node, node]}))
    programs.answer("get-contexts", stdout="one\ntwo\n")
    return programs


def test_a_cluster_that_cannot_take_the_run_says_so(kubectl: Programs) -> None:
    LAUNCHER.check(job("launch.kubernetes.context=two"))
    with pytest.raises(ConfigError, match="no context 'three'"):
        LAUNCHER.check(job("launch.kubernetes.context=three"))
    with pytest.raises(ConfigError, match="room for 2"):
        LAUNCHER.check(job(machines=3))
    LAUNCHER.check(job("launch.kubernetes.autoscaled=true", machines=3))
    missing = "Error from server (NotFound): customresourcedefinitions"
    kubectl.answer("customresourcedefinition", code=1, stderr=missing)
    for target in ENVELOPES:
        with pytest.raises(ConfigError, match="does not know the kind") as found:
            find_launcher(target).check(job())
        assert "kubectl apply" in str(found.value.fix) or "helm install" in str(found.value.fix)
    assert not [words for words in kubectl.calls if {"apply", "create", "delete"} & set(words)]


def test_a_job_of_this_name_that_runs_is_left_alone(kubectl: Programs) -> None:
    running = {"metadata": {"name": "tiny-run"}, "spec": {}, "status": {"active": 2, "ready": 2}}
    kubectl.answer("jobs.batch", stdout=json.dumps(running))
    with pytest.raises(ConfigError, match="has a job of this name already"):
        LAUNCHER.check(job())


def test_files_are_applied_in_order_and_removed_job_first(kubectl: Programs, tmp_path: Path) -> None:
    given = job("launch.kubernetes.namespace=team")
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    kubectl.answer("tiny-run-prepare", stdout=json.dumps({"metadata": {}, "status": done}))
    for name, text in LAUNCHER.files(given).items():
        (tmp_path / name).write_text(text)
    handle = LAUNCHER.submit(given, tmp_path)
    applied = [Path(words[-1]).name for words in kubectl.calls if "apply" in words]
    assert applied == ["10-support.yaml", "20-prepare.yaml", "30-train.yaml"]
    secret = yaml.safe_load(kubectl.given)
    assert secret["kind"] == "Secret" and len(secret["stringData"]["HEADWAY_SECRET"]) == 64
    assert not any(secret["stringData"]["HEADWAY_SECRET"] in word for words in kubectl.calls for word in words)
    before = len(kubectl.calls)
    LAUNCHER.cancel(handle)
    removed = [next(word for word in words if "/" in word) for words in kubectl.calls[before:]]
    assert removed[0] == "job.batch/tiny-run" and "configmap/tiny-run" in removed
    assert removed[-1] == "secret/tiny-run-machines"
    assert all("--namespace=team" in words for words in kubectl.calls[before:])


def test_data_are_prepared_before_the_run_is_started(kubectl: Programs, tmp_path: Path) -> None:
    given = job()
    for name, text in LAUNCHER.files(given).items():
        (tmp_path / name).write_text(text)
    about = {"metadata": {"name": "tiny-run-prepare"}, "spec": {}}
    failed = {"conditions": [{"type": "Failed", "status": "True", "message": "BackoffLimitExceeded"}]}
    kubectl.answer("tiny-run-prepare", stdout=json.dumps({**about, "status": failed}))
    with pytest.raises(ConfigError, match="data cannot be prepared"):
        LAUNCHER.submit(given, tmp_path)
    assert "30-train.yaml" not in {Path(words[-1]).name for words in kubectl.calls}
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    kubectl.answer("tiny-run-prepare", stdout=json.dumps({**about, "status": done}))
    LAUNCHER.submit(given, tmp_path)
    assert "30-train.yaml" in {Path(words[-1]).name for words in kubectl.calls}


def test_a_preparation_that_cannot_start_says_why(
    kubectl: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = job()
    for name, text in LAUNCHER.files(given).items():
        (tmp_path / name).write_text(text)
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    kubectl.answer("pods", stdout=json.dumps({"items": [{"status": {"containerStatuses": [waiting]}}]}))
    kubectl.answer("tiny-run-prepare", stdout=json.dumps({"metadata": {}, "spec": {}, "status": {"active": 1}}))
    looks = list[float]()

    def finish_at_the_second_look(seconds: float) -> None:
        looks.extend([seconds] * (seconds >= 1))
        if len(looks) == 2:
            done = {"conditions": [{"type": "Complete", "status": "True"}]}
            kubectl.answer("tiny-run-prepare", stdout=json.dumps({"metadata": {}, "status": done}))

    monkeypatch.setattr(time, "sleep", finish_at_the_second_look)
    LAUNCHER.submit(given, tmp_path)
    assert capsys.readouterr().err.count("job tiny-run-prepare: ImagePullBackOff no such image") == 1


CONDITIONS = {
    "kubernetes": ({"conditions": [{"type": "Complete", "status": "True"}]}, {"ready": 1, "active": 2}),
    "jobset": ({"conditions": [{"type": "Completed", "status": "True"}]}, {"replicatedJobsStatus": [{"ready": 1}]}),
    "trainjob": ({"conditions": [{"type": "Complete", "status": "True"}]}, {"jobsStatus": [{"ready": 1}]}),
    "pytorchjob": (
        {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]},
        {"conditions": [{"type": "Created", "status": "True"}, {"type": "Running", "status": "True"}]},
    ),
    "rayjob": (
        {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"},
        {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"},
    ),
}


@pytest.mark.parametrize("target", CONDITIONS)
def test_states_of_every_kind_are_read(target: str) -> None:
    state_of = find_launcher(target).envelope.state_of  # type: ignore[attr-defined]
    finished, running = CONDITIONS[target]
    about: dict[str, Any] = {"metadata": {"name": "a"}}
    assert state_of({**about, "status": finished})[0] == "finished"
    assert state_of({**about, "status": running})[0] == "running"
    assert state_of(about)[0] == "waiting"
    assert state_of({"metadata": {"deletionTimestamp": "now"}, "status": running})[0] == "stopping"


def test_a_rayjob_that_gets_another_cluster_is_not_over() -> None:
    state_of = find_launcher("rayjob").envelope.state_of  # type: ignore[attr-defined]
    seen = [("Running", "FAILED"), ("Retrying", "FAILED"), ("Initializing", ""), ("Failed", "FAILED")]
    objects = [
        {"metadata": {"name": "a"}, "status": {"jobDeploymentStatus": deployment, "jobStatus": said}}
        for deployment, said in seen
    ]
    assert [state_of(one)[0] for one in objects] == ["waiting", "waiting", "waiting", "failed"]


def test_a_pod_that_finds_no_room_is_explained(kubectl: Programs, tmp_path: Path) -> None:
    from headway.clouds.launchers.launcher import Handle

    kubectl.answer("jobs.batch", stdout=json.dumps({"metadata": {"name": "a"}, "status": {"active": 1}}))
    condition = {"reason": "Unschedulable", "message": "0/3 nodes are available"}
    kubectl.answer("pods", stdout=json.dumps({"items": [{"status": {"phase": "Pending", "conditions": [condition]}}]}))
    state = LAUNCHER.status(Handle("kubernetes", "a", "1", 1, {"namespace": "team"}))
    assert state.state == "waiting" and state.machines == 0 and "0/3 nodes are available" in state.engine


def test_all_launchers_are_found_and_follow_the_protocol() -> None:
    for name in LAUNCHERS:
        launcher = find_launcher(name)
        assert all(callable(getattr(launcher, method)) for method in ("problems", "files", "check", "submit"))
        assert all(callable(getattr(launcher, method)) for method in ("status", "logs", "cancel"))
    with pytest.raises(ConfigError, match="no launcher 'nomad'"):
        find_launcher("nomad")

"""What API servers and admission controllers refuse is refused here first: names, amounts, images, rights, ports."""

from __future__ import annotations

from typing import Any

import pytest

from headway.clouds.launchers.api_server import read_amount
from headway.clouds.launchers.job import smoke_job
from headway.clouds.launchers.kubernetes import LAUNCHER, PREPARE, SUPPORT, KubernetesLauncher
from headway.clouds.launchers.launcher import find_launcher
from support.launchers import documents, job
from support.pod_security import refusals

TARGETS = ("kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob")


def templates(value: Any) -> list[dict[str, Any]]:
    """The pods within manifests, wherever they stand."""
    if isinstance(value, list):
        return [found for item in value for found in templates(item)]
    if not isinstance(value, dict):
        return []
    here = [value] if "containers" in value.get("spec", {}) else []
    return here + [found for item in value.values() for found in templates(item)]


def said(target: str, *overrides: str, machines: int = 2) -> str:
    problems = find_launcher(target).problems(job(*overrides, machines=machines))
    return "\n".join(f"{one.what} | {one.where} | {one.fix}" for one in problems)


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "machines", "most"),
    [
        ("kubernetes", 1, 61),  # NAME-0 is the host name of a pod of an indexed Job
        ("kubernetes", 12, 60),
        ("jobset", 12, 46),  # NAME-train-0-11-xxxxx
        ("trainjob", 2, 48),  # NAME-node-0-1-xxxxx
        ("pytorchjob", 2, 54),  # NAME-worker-1
        ("rayjob", 2, 47),  # the limit of KubeRay
    ],
)
def test_a_name_leaves_room_for_what_the_engine_appends(target: str, machines: int, most: int) -> None:
    assert not said(target, f"name={'n' * most}", machines=machines)
    message = said(target, f"name={'n' * (most + 1)}", machines=machines)
    assert f"at most {most} lower-case letters" in message and f"name={'n' * most}" in message


@pytest.mark.parametrize("target", TARGETS)
def test_a_name_of_a_service_begins_with_a_letter(target: str) -> None:
    message = said(target, "name=7b-lr3")
    assert "the first a letter" in message and "name=run-7b-lr3" in message


def test_a_plain_job_of_one_machine_has_no_service() -> None:
    assert not said("kubernetes", "name=7b-lr3", machines=1)
    (message,) = (one.fix for one in LAUNCHER.problems(smoke_job(job(f"name={'n' * 58}").config)))
    assert message == f"name={'n' * 55}"  # with -smoke and -0 it has 63 characters


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("launch.kubernetes.memory=8GB", "launch.kubernetes.memory=8G"),
        ("launch.kubernetes.memory='8 gib'", "launch.kubernetes.memory=8Gi"),
        ("launch.kubernetes.shared_memory=lots", "launch.kubernetes.shared_memory=8Gi"),
        ("launch.kubernetes.scratch=10GiB", "launch.kubernetes.scratch=10Gi"),
        ("launch.kubernetes.quota={requests.memory: 8GB}", "launch.kubernetes.quota.requests.memory=8G"),
        (
            "launch.kubernetes.volumes=[{claim: all, mount: /runs, size: 1TB}, {claim: data, mount: /data}]",
            "launch.kubernetes.volumes.0.size=1T",
        ),
        (
            "launch.kubernetes.volumes=[{claim: All_Runs, mount: /runs}, {claim: data, mount: /data}]",
            "'All_Runs' names no object",
        ),
        ("launch.kubernetes.namespace=Team_A", "launch.kubernetes.namespace=team-a"),
        ("launch.kubernetes.secret_names=[AWS_KEYS]", "'AWS_KEYS' names no object"),
        ("launch.kubernetes.queue={kind: kueue, name: 'team a'}", "'team a' names no object"),
        ("launch.image='registry/headway: 1'", "names no image"),
        ("launch.image=registry/Headway:1", "names no image"),
        ("launch.image=https://registry/headway:1", "names no image"),
    ],
)
def test_a_value_that_the_api_server_refuses_is_refused_with_its_key(override: str, says: str) -> None:
    assert says in said("kubernetes", override)


@pytest.mark.parametrize(
    "image",
    [
        "headway", "headway:1", "team/headway:v1.2_3", "registry:5000/team/headway", "registry.example/team/headway:1",
        "localhost:5000/headway@sha256:" + "0f" * 32, "ghcr.io/team/head-way/train:1@sha256:" + "0f" * 32,
    ],
)  # fmt: skip
def test_images_as_registries_name_them_are_taken(image: str) -> None:
    assert not said("kubernetes", f"launch.image={image}")


def test_amounts_are_read_as_the_api_server_reads_them() -> None:
    read = {text: read_amount(text) for text in ("8Gi", "8G", "500m", "1.5Ki", ".5", "1e3", "2E", "7", "12E2")}
    assert read == {
        "8Gi": 8 * 2**30, "8G": 8e9, "500m": 0.5, "1.5Ki": 1536, ".5": 0.5, "1e3": 1000, "2E": 2e18, "7": 7,
        "12E2": 1200,
    }  # fmt: skip
    assert [read_amount(text) for text in ("", "8GB", "8 Gi", "-1", "1e", "Gi", "8gi", "٣Gi")] == [None] * 8


# Data -----------------------------------------------------------------------------------------------------------------


def test_sources_that_no_pod_can_see_are_refused_unless_nothing_needs_them() -> None:
    own = "data.sources=[{path: corpus/web}]"
    assert "no pod can see corpus/web" in said("kubernetes", own) and "data.sources" in said("kubernetes", own)
    for seen in ("/data/web", "/workspace/web", "s3://bucket/web", "hf://org/name", "stdlib:"):
        assert not said("kubernetes", f"data.sources=[{{path: '{seen}'}}]"), seen
    assert not said("kubernetes", own, "data.remote=s3://bucket/store")
    assert not said("kubernetes", own, "launch.kubernetes.prepared=true")
    assert PREPARE in LAUNCHER.files(job()) and PREPARE not in LAUNCHER.files(job("launch.kubernetes.prepared=true"))


def test_a_smoke_job_needs_no_volume_for_what_it_saves() -> None:
    config = job("runs=/elsewhere", "launch.kubernetes.volumes=[]").config
    assert not list(LAUNCHER.problems(smoke_job(config)))


# Rights ---------------------------------------------------------------------------------------------------------------


def _admitted(target: str, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """The pods that the API server is asked for, with what a controller adds to them, and the namespace's level."""
    launcher = find_launcher(target)
    assert isinstance(launcher, KubernetesLauncher)
    found = documents(launcher.files(job("launch.kubernetes.create_namespace=true", *overrides)))
    pods = [template["spec"] for template in templates(found)]
    (level,) = [one["metadata"]["labels"] for one in found if one["kind"] == "Namespace"]
    for one in found:
        if one["kind"] == "PyTorchJob":  # as its operator's default template has it
            pods[-1] = {**pods[-1], "initContainers": [{"name": "init-pytorch", "image": "alpine:3.10"}]}
        if one["kind"] == "RayJob" and (added := one["spec"]["rayClusterSpec"].get("autoscalerOptions")) is not None:
            head = one["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
            pods.append({**head, "containers": [*head["containers"], {"name": "autoscaler", **added}]})
    return pods, level["pod-security.kubernetes.io/enforce"]


@pytest.mark.parametrize("overrides", [(), ("launch.rayjob.min_machines=1",)], ids=["plain", "scaled"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_pod_is_admitted_by_the_level_of_its_namespace(target: str, overrides: tuple[str, ...]) -> None:
    pods, level = _admitted(target, *overrides)
    assert level == ("baseline" if target == "pytorchjob" else "restricted")
    assert len(pods) >= 2 + (target in ("pytorchjob", "rayjob"))
    for pod in pods:
        assert not refusals(pod, level)
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_check_refuses_what_it_must() -> None:
    (pod, *_), _ = _admitted("kubernetes")
    bad = {**pod, "securityContext": {}, "hostNetwork": True, "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}
    assert {"hostNetwork", "volume v: hostPath", "headway: runAsNonRoot", "headway: seccompProfile"} <= set(
        refusals(bad, "restricted")
    )
    pods, _ = _admitted("pytorchjob")
    assert "init-pytorch: allowPrivilegeEscalation" in refusals(pods[-1], "restricted")
    plain = {**pod, "containers": [{"name": "a", "image": "b"}]}
    assert set(refusals(plain, "restricted")) == {"a: allowPrivilegeEscalation", "a: capabilities.drop"}


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_pod_writes_on_its_node_is_bounded(target: str) -> None:
    pods, _ = _admitted(target, "launch.kubernetes.scratch=7Gi", "data.store=/elsewhere/store")
    for pod in pods:
        for volume in pod["volumes"]:
            empty = volume.get("emptyDir")
            assert empty is None or empty["sizeLimit"] == ("64Gi" if volume["name"] == "shm" else "7Gi")
        for container in pod["containers"]:
            if container["name"] in ("headway", "node", "pytorch"):
                resources = container["resources"]
                assert resources["limits"]["ephemeral-storage"] == "7Gi"
                assert resources["requests"]["ephemeral-storage"] == "1Gi"
    small = templates(documents(LAUNCHER.files(job("launch.kubernetes.scratch=100Mi"))))[-1]
    assert small["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "100Mi"


def test_pods_of_ray_get_no_secret_that_they_do_not_use() -> None:
    launcher = find_launcher("rayjob")
    files = launcher.files(job("launch.kubernetes.secret_names=[s3]"))
    assert "HEADWAY_SECRET" not in "".join(files.values()) and "secret.md" not in files
    (run,) = [one for one in documents(files) if one["kind"] == "RayJob"]
    submitter = run["spec"]["submitterPodTemplate"]["spec"]
    assert [container["name"] for container in submitter["containers"]] == ["ray-job-submitter"]
    assert "envFrom" not in submitter["containers"][0] and "command" not in submitter["containers"][0]
    assert submitter["restartPolicy"] == "Never"


# Ports ----------------------------------------------------------------------------------------------------------------


def _egress(*overrides: str) -> list[dict[str, Any]]:
    (policy,) = [
        one for one in documents({SUPPORT: LAUNCHER.files(job(*overrides))[SUPPORT]}) if one["kind"] == "NetworkPolicy"
    ]
    found: list[dict[str, Any]] = policy["spec"]["egress"]
    return found


@pytest.mark.parametrize(
    ("override", "port"),
    [
        ("checkpoint.remote={url: 's3://b/runs', options: {endpoint_url: 'http://minio.team:9000'}}", 9000),
        ("data.sources=[{path: 's3://b/web', storage_options: {endpoint_url: 'http://minio:9010'}}]", 9010),
        ("data.remote=http://files.team/store", 80),
        ("track=[{mlflow: {uri: 'http://mlflow:5000'}}]", 5000),
        ("track=[{opentelemetry: {endpoint: 'http://[fd00::1]:4318'}}]", 4318),
        ("launch.environment={MLFLOW_TRACKING_URI: 'http://mlflow:5001'}", 5001),
        ("telemetry.alert='curl http://alerts.team:9093/hook'", 9093),
    ],
)  # fmt: skip
def test_the_network_opens_the_ports_that_the_config_uses(override: str, port: int) -> None:
    ports = [one["port"] for rule in _egress(override) if "to" not in rule for one in rule["ports"]]
    assert ports == [53, 53, 443, port]


def test_addresses_of_this_machine_open_nothing_and_metadata_only_where_a_cloud_is_watched() -> None:
    rules = _egress("track=[{mlflow: {uri: 'http://127.0.0.1:5000'}}]", "data.remote=file:///mnt/store")
    assert [one["port"] for rule in rules if "to" not in rule for one in rule["ports"]] == [53, 53, 443]
    metadata = {"to": [{"ipBlock": {"cidr": "169.254.0.0/16"}}]}
    for watch, opened in (("auto", True), ("[gcp]", True), ("none", False), ("[slurm]", False)):
        rules = _egress(f"preemption.watch={watch}")
        assert any(rule.items() >= metadata.items() for rule in rules) is opened, watch


@pytest.mark.parametrize("target", ["kubernetes", "jobset", "trainjob", "pytorchjob"])
def test_failures_are_counted_by_machines_not_by_pods(target: str) -> None:
    found = documents(find_launcher(target).files(job("launch.kubernetes.max_failures=3", machines=4)))
    limits = [value for one in found if one["metadata"]["name"] == "tiny-run" for value in _values(one, "backoffLimit")]
    assert limits == [12]


def _values(value: Any, key: str) -> list[Any]:
    if isinstance(value, list):
        return [found for item in value for found in _values(item, key)]
    if not isinstance(value, dict):
        return []
    return ([value[key]] if key in value else []) + [found for item in value.values() for found in _values(item, key)]

"""`headway launch policy`: the least rights of a run at its buckets, and of people on Kubernetes."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from headway.checkpoint.remote.acquire import acquire_tier
from headway.checkpoint.remote.audit_anchor import audit_place, read_anchors
from headway.checkpoint.remote.tier import journal_of
from headway.checkpoint.run_identity import run_identity
from headway.checkpoint.store import CheckpointStore
from headway.cli.application import application
from headway.clouds.launchers.kubernetes import LAUNCHER, KubernetesLauncher
from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.policy import places_of, policy_for
from headway.clouds.launchers.roles import role_objects
from headway.config import Config, RemoteConfig, TrainConfig, load_config
from headway.core.errors import ConfigError
from headway.core.storage import client
from headway.run.directory.run_directory import RunDirectory
from support.launchers import COMPLETE, job
from support.object_storage import InProcess, S3Server
from support.parts_table import program
from support.states import make_state

#: What the API reference of S3 says each operation needs.
RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
}
SOURCES = "data.sources=['s3://texts/books/*.jsonl', {path: 's3://texts/one.jsonl'}, local.txt]"


def config_of(*overrides: str) -> Config:
    return load_config("quickstart", [*COMPLETE, "checkpoint.remote.url=s3://bucket/runs", SOURCES, *overrides])


def allows(policy: dict[str, Any], action: str, resource: str, prefix: str = "") -> bool:
    """Evaluate an IAM policy of these few forms: a deny beats an allow (IAM user guide, evaluation logic)."""
    effects = set()
    for statement in policy["Statement"]:
        actions, resources = statement["Action"], statement["Resource"]
        actions = [actions] if isinstance(actions, str) else actions
        resources = [resources] if isinstance(resources, str) else resources
        wanted = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
        if (
            action in actions
            and any(fnmatch.fnmatchcase(resource, pattern) for pattern in resources)
            and any(fnmatch.fnmatchcase(prefix, pattern) for pattern in wanted)
        ):
            effects.add(statement["Effect"])
    return effects == {"Allow"}


def test_the_places_of_a_run_are_its_own() -> None:
    found = {(place.bucket, place.path, place.writes) for place in places_of(config_of())}
    assert found == {("bucket", "runs/tiny-run", True), ("texts", "books", False), ("texts", "one.jsonl", False)}
    found = {place.path for place in places_of(config_of("data.remote=s3://stores/web", "data.sources=[local.txt]"))}
    assert found == {"runs/tiny-run", "web"}


def test_a_run_gets_only_its_own_folder_on_aws() -> None:
    policy = json.loads(policy_for(config_of(), "aws").text)
    own, anchors = "arn:aws:s3:::bucket/runs/tiny-run", "arn:aws:s3:::bucket/runs/tiny-run/audit/a/00000001-b.json"
    for action in sorted({*RIGHTS.values()} - {"s3:ListBucket"}):
        assert allows(policy, action, f"{own}/run-001/step-00000001/manifest.json"), action
        for other in ("arn:aws:s3:::bucket/runs/tiny-run2/run-001/a", "arn:aws:s3:::bucket/x", "arn:aws:s3:::other/a"):
            assert not allows(policy, action, other), action
    assert allows(policy, "s3:PutObject", anchors) and not allows(policy, "s3:DeleteObject", anchors)
    assert allows(policy, "s3:GetObject", "arn:aws:s3:::texts/books/a.jsonl")
    assert allows(policy, "s3:GetObject", "arn:aws:s3:::texts/one.jsonl")
    assert not allows(policy, "s3:PutObject", "arn:aws:s3:::texts/books/a.jsonl")
    assert allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", "runs/tiny-run/run-001/")
    assert (
        not allows(policy, "s3:ListBucket", "arn:aws:s3:::bucket", "runs/")
        and "*" not in str(policy["Statement"][1])[:80]
    )


def test_parliament_finds_nothing_in_the_policy() -> None:
    parliament = program("parliament")
    if parliament is None:
        pytest.skip("there is no parliament: pip install parliament")
    policy = policy_for(config_of(), "aws").text

    def findings(text: str) -> str:
        done = subprocess.run([parliament], capture_output=True, text=True, input=text, check=False)
        return done.stdout + done.stderr

    assert findings(policy).strip() == ""
    assert "DeletObject" in findings(policy.replace("s3:DeleteObject", "s3:DeletObject"))


@pytest.mark.parametrize("s3_server", [InProcess], indirect=True)
def test_the_actions_are_those_that_the_client_uses(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what botocore says that it sends, in the life of a remote tier; none is allowed that nothing needs."""
    monkeypatch.setattr(client, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    run = RunDirectory(tmp_path / "tiny-run")
    config = Config(name="tiny-run", train=TrainConfig(steps=4))
    remote = RemoteConfig(url=f"{s3.url}/policy")
    with caplog.at_level(logging.DEBUG):
        run.begin_attempt("x").finish("finished", 0)
        tier = acquire_tier(remote, 1, run_identity(config, run=run.path))
        store = CheckpointStore(run.checkpoints)
        for step in (1, 2):
            store.save(step, make_state(step), {"step": step}, {"attempt": 1})
            tier.publish(store.info(step).path, journal_of(run.path, step))
        large = tmp_path / "large"
        large.write_bytes(bytes(12 * 2**20))
        tier.objects.upload("step-00000002/large", large)
        tier.objects.download("step-00000002/large", tmp_path / "back", large.stat().st_size)
        tier.set_aside(2)
        tier.discard(1)
        assert list(read_anchors(audit_place(remote, run.path)))
    sent = set(re.findall(r"OperationModel\(name=(\w+)\)", caplog.text))
    assert {"PutObject", "GetObject", "ListObjectsV2", "CreateMultipartUpload", "DeleteObject"} <= sent <= {*RIGHTS}
    policy = json.loads(policy_for(config_of(), "aws").text)
    allowed = {a for s in policy["Statement"] if s["Effect"] == "Allow" for a in [s["Action"]] if isinstance(a, str)}
    allowed |= {a for s in policy["Statement"] if isinstance(s["Action"], list) for a in s["Action"]}
    # An upload that fails is aborted.
    assert allowed == {RIGHTS[name] for name in sent} | {"s3:AbortMultipartUpload"}


def test_other_clouds_confine_a_run_to_its_folder() -> None:
    gcp = json.loads(policy_for(config_of("checkpoint.remote.url=gs://bucket/runs"), "gcp").text)
    (binding,) = gcp["buckets"]["bucket"]["bindings"]
    assert 'startsWith("projects/_/buckets/bucket/objects/runs/tiny-run/")' in binding["condition"]["expression"]
    assert "storage.objects.delete" in gcp["roles"]["headwayWriter"]["includedPermissions"]
    remote = "checkpoint.remote={url: 'az://bucket/runs', options: {account_name: team}}"
    azure = json.loads(policy_for(config_of(remote), "azure").text)
    (assignment,) = azure["assignments"]
    assert assignment["scope"].endswith("storageAccounts/team/blobServices/default/containers/bucket")
    assert "StringStartsWith 'runs/tiny-run/'" in assignment["condition"]
    assert assignment["condition"].count("(") == assignment["condition"].count(")")
    with pytest.raises(ConfigError, match="names no bucket at gcp"):
        policy_for(config_of(), "gcp")


def can(documents: list[dict[str, Any]], role: str, verb: str, resource: str, group: str = "", name: str = "") -> bool:
    """Evaluate a role: rules only add rights (Kubernetes' documentation of RBAC)."""
    (found,) = [d for d in documents if d["kind"] == "Role" and d["metadata"]["name"] == f"headway-{role}"]
    return any(
        verb in rule["verbs"]
        and resource in rule["resources"]
        and group in rule["apiGroups"]
        and name in rule.get("resourceNames", [name])
        for rule in found["rules"]
    )


@pytest.mark.parametrize("target", ["kubernetes", "jobset", "trainjob", "pytorchjob", "rayjob"])
def test_roles_are_valid_and_have_the_least_rights(target: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    launcher = find_launcher(target)
    assert isinstance(launcher, KubernetesLauncher)
    volumes = "launch.kubernetes.volumes=[{claim: runs, mount: /runs, size: 1Ti}, {claim: data, mount: /data}]"
    documents = role_objects(launcher, job(volumes, "launch.kubernetes.namespace=team"))
    for document in documents:
        validate(document, "1.37", strict=True)
        assert document["metadata"]["namespace"] == "team"
    plural, _, group = launcher.envelope.resource.partition(".")
    for role, may in (("viewer", False), ("trainer", True), ("operator", True)):
        assert can(documents, role, "get", "pods/log") and can(documents, role, "watch", plural, group)
        assert can(documents, role, "create", plural, group) is may
        assert can(documents, role, "patch", "configmaps") is may
        assert can(documents, role, "create", "persistentvolumeclaims") is (role == "operator")
        # Nobody reads other secrets, runs commands in pods, or gives rights away.
        assert not can(documents, role, "get", "secrets", name="other")
        assert not can(documents, role, "list", "secrets", name="other")
        for verb, resource, of in (
            ("create", "pods/exec", ""),
            ("create", "rolebindings", "rbac.authorization.k8s.io"),
        ):
            assert not can(documents, role, verb, resource, of)
        assert not any(
            "*" in rule[key] for d in documents if d["kind"] == "Role" for rule in d["rules"] for key in rule
        )
    shares = launcher.envelope.shares_secret
    assert can(documents, "trainer", "get", "secrets", name="tiny-run-machines") is shares


def test_a_trainer_may_apply_every_object_of_a_launch() -> None:
    given = job()
    documents = role_objects(LAUNCHER, given)
    for name, text in LAUNCHER.files(given).items():
        for document in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
            group, kind = document["apiVersion"].rpartition("/")[0], document["kind"]
            plural = {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
            for verb in ("get", "create", "patch", "delete"):
                assert can(documents, "trainer", verb, plural, group), kind


def test_the_verb_prints_one_of_both() -> None:
    def invoke(*words: str) -> tuple[str, BaseException | None]:
        result = CliRunner().invoke(application(["launch"]), ["launch", "policy", "quickstart", *COMPLETE, *words])
        return result.stdout, result.exception

    printed, error = invoke("checkpoint.remote.url=s3://bucket/runs", "--cloud", "aws")
    assert error is None and json.loads(printed)["Version"] == "2012-10-17"
    printed, error = invoke("--on", "jobset", "train.global_batch=16")
    assert error is None and len(list(yaml.safe_load_all(printed))) == 6
    assert isinstance(invoke("--on", "slurm")[1], ConfigError) and isinstance(invoke()[1], ConfigError)

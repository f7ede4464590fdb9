"""Lifecycle rules for buckets: as each cloud takes them, and such that they remove nothing which a run needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.checkpoint.lifecycle import bucket_rule
from headway.checkpoint.retention import Every, Rules
from headway.core.errors import ConfigError
from headway.lab.doctor.lifecycle import gcs_rules, s3_rules
from object_storage import S3Server
from support import headway

FOREVER = Rules(keep_every=Every(1000, "steps"), keep_for_seconds=20 * 86400 + 1)


@pytest.mark.parametrize("rules", [Rules(), FOREVER])
def test_no_rule_reaches_a_live_object_as_the_doctor_reads_it(rules: Rules) -> None:
    assert not list(s3_rules(bucket_rule("s3://bucket/runs", rules).document))
    assert not list(gcs_rules(bucket_rule("gs://bucket/runs", rules).document))
    for url in ("s3://bucket/runs", "gs://bucket/runs", "az://box/runs"):
        assert 'Expiration": {"Days' not in bucket_rule(url, rules).text


def test_the_rules_follow_what_the_run_keeps() -> None:
    plain, kept = (bucket_rule("s3://bucket/runs/", rules).document["Rules"] for rules in (Rules(), FOREVER))
    assert len(plain) == 1 and plain[0]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 7}
    assert kept[0]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 21}, "as long as the run keeps them, or longer"
    assert kept[1]["Filter"]["And"] == {"Prefix": "runs/", "ObjectSizeGreaterThan": 2**20}
    google = bucket_rule("gs://bucket", FOREVER)
    removes, _, moves = (google.document["lifecycle"]["rule"][place] for place in (1, 0, 2))
    assert removes["condition"] == {"daysSinceNoncurrentTime": 21} and moves["action"]["storageClass"] == "NEARLINE"
    assert "gs://bucket " in google.command
    (azure,) = bucket_rule("abfss://box@account.dfs.core.windows.net/runs", FOREVER).document["rules"]
    assert azure["definition"]["filters"]["prefixMatch"] == ["box/runs/"]
    assert azure["definition"]["actions"]["baseBlob"] == {"tierToCool": {"daysAfterModificationGreaterThan": 30}}


def test_s3_takes_the_rule(s3: S3Server) -> None:
    botocore = pytest.importorskip("botocore.session")
    client = botocore.get_session().create_client("s3", endpoint_url=s3.endpoint, region_name="us-east-1")
    bucket, _, _ = s3.url.partition("://")[2].partition("/")
    for rules in (Rules(), FOREVER):
        document = bucket_rule(f"{s3.url}/runs", rules).document
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=document)
        found = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
        assert [rule["ID"] for rule in found] == [rule["ID"] for rule in document["Rules"]]


def test_the_command_prints_the_rule_alone_and_how_to_apply_it(tiny: Callable[..., Path]) -> None:
    remote = {"url": "s3://bucket/runs", "keep_for": "30 days"}
    config = tiny(checkpoint={"remote": remote})
    done = headway("checkpoints", "lifecycle", "s3://bucket/runs/tiny", "--config", config)
    assert done.returncode == 0, done.stderr
    (rule,) = json.loads(done.stdout)["Rules"]
    assert rule["NoncurrentVersionExpiration"]["NoncurrentDays"] == 30 and "--bucket bucket" in done.stderr
    for words, reason in (
        (["s3://other/runs", "--config", config], "keeps nothing at s3://other/runs"),
        (["/mnt/shared"], "is no URL of a bucket"),
    ):
        done = headway("checkpoints", "lifecycle", *words)
        assert done.returncode == 2 and reason in done.stderr and not done.stdout
    with pytest.raises(ConfigError, match="is no URL of a bucket"):
        bucket_rule("file:///mnt/shared", Rules())

"""Lifecycle rules for buckets: as each cloud takes them, and such that they remove nothing which a run needs."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.checkpoint.lifecycle import bucket_rule
from headway.checkpoint.retention import Rules
from headway.config import Interval
from headway.core.errors import ConfigError
from headway.lab.doctor.lifecycle import gcs_rules, s3_rules
from support.runs import headway

FOREVER = Rules(keep_every=Interval(1000, "steps"), keep_for_seconds=20 * 86400 + 1)


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


@pytest.mark.parametrize("rules", [Rules(), FOREVER])
def test_the_client_of_s3_knows_every_key_of_the_rule(rules: Rules) -> None:
    botocore = pytest.importorskip("botocore.session", reason="there is no S3 client: pip install '.[s3]'")
    shape = botocore.get_session().get_service_model("s3").operation_model("PutBucketLifecycleConfiguration")
    wanted = {"Bucket": "bucket", "LifecycleConfiguration": bucket_rule("s3://bucket/runs", rules).document}
    report = importlib.import_module("botocore.validate").ParamValidator().validate(wanted, shape.input_shape)
    assert not report.has_errors(), report.generate_report()


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

# ruff: noqa: E501  (a table, with one row for each case)
"""Lifecycle rules that would take a run's claims away are found, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config import Config
from headway.lab.doctor import lifecycle
from headway.lab.doctor.lifecycle import examine_lifecycle, gcs_rules, reaches_claims, s3_rules


@pytest.mark.parametrize(
    ("prefix", "reaches"),
    [
        ("", True),
        ("ru", True),
        ("runs/", True),
        ("runs/big/", True),
        ("runs/big/run-", True),
        ("runs/big/run-001", True),
        ("runs/big/run-001/", True),
        ("runs/big/run-001/own", True),
        ("runs/big/run-001/owners/0000", True),
        ("runs/big/run-001/step-", False),
        ("runs/big/exports/", False),
        ("runs/bigger/", False),
        ("other/", False),
    ],
)
def test_a_prefix_reaches_claims_if_one_can_begin_with_it(prefix: str, reaches: bool) -> None:
    assert reaches_claims(prefix, "runs/big/") == reaches
    claims = [f"runs/big/run-{generation:03d}/owners/{number:08d}.json" for generation in (1, 2) for number in (1, 2)]
    assert any(claim.startswith(prefix) for claim in claims) == reaches


def s3(**rule: Any) -> dict[str, Any]:
    return {"Rules": [{"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": "runs/"}, **rule}]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (s3(Expiration={"Days": 30}), ["removes objects after 30 days"]),
        (s3(Expiration={"Date": "2027-01-01"}, Filter={}), ["removes objects on 2027-01-01"]),
        (s3(Expiration={"Days": 30}, Filter={"And": {"Prefix": "x", "ObjectSizeLessThan": 9999}}), ["removes objects after 30 days"]),
        (s3(Expiration={"Days": 30}, Status="Disabled"), []),
        (s3(Expiration={"ExpiredObjectDeleteMarker": True}), []),
        (s3(NoncurrentVersionExpiration={"NoncurrentDays": 3}), []),
        (s3(AbortIncompleteMultipartUpload={"DaysAfterInitiation": 1}), []),
        (s3(Expiration={"Days": 30}, Filter={"Tag": {"Key": "a", "Value": "b"}}), []),
        (s3(Expiration={"Days": 30}, Filter={"And": {"Prefix": "x", "Tags": [{"Key": "a", "Value": "b"}]}}), []),
        (s3(Expiration={"Days": 30}, Filter={"ObjectSizeGreaterThan": 131072}), []),
        (s3(Transitions=[{"Days": 3, "StorageClass": "GLACIER"}]), []),
        (
            {**s3(Transitions=[{"Days": 3, "StorageClass": "GLACIER"}]), "TransitionDefaultMinimumObjectSize": "varies_by_storage_class"},
            ["moves objects to an archive that cannot be read at once"],
        ),
    ],
)  # fmt: skip
def test_what_rules_of_s3_do_to_claims(answer: dict[str, Any], found: list[str]) -> None:
    assert [rule.does for rule in s3_rules(answer)] == found


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ({"action": {"type": "Delete"}, "condition": {"age": 30}}, [("",)]),
        ({"action": {"type": "Delete"}, "condition": {"age": 3, "matchesPrefix": ["a/", "b/"]}}, [("a/", "b/")]),
        ({"action": {"type": "Delete"}, "condition": {"age": 3, "matchesSuffix": [".safetensors"]}}, []),
        ({"action": {"type": "Delete"}, "condition": {"age": 3, "isLive": False}}, []),
        ({"action": {"type": "Delete"}, "condition": {"numNewerVersions": 3}}, []),
        ({"action": {"type": "SetStorageClass", "storageClass": "COLDLINE"}, "condition": {"age": 3}}, []),
        ({"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 3}}, []),
    ],
)
def test_what_rules_of_google_do_to_claims(rule: dict[str, Any], found: list[tuple[str, ...]]) -> None:
    assert [rule.prefixes for rule in gcs_rules({"lifecycle": {"rule": [rule]}})] == found


def config(tmp_path: Path, url: str) -> Config:
    return Config(name="big", runs=tmp_path, checkpoint={"remote": {"url": url}})


def test_a_store_that_does_not_tell_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(examine_lifecycle(config(tmp_path, f"file://{tmp_path}"))) == []
    (note,) = examine_lifecycle(config(tmp_path, "memory://bucket/runs"))
    assert note.level == "note" and "cannot be queried" in note.what

    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setitem(lifecycle._READERS, "memory", refuse)  # type: ignore[index]
    (note,) = examine_lifecycle(config(tmp_path, "memory://bucket/runs"))
    assert note.level == "note" and "cannot be read: Access Denied" in note.what

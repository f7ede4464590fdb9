"""Aliases: a history that only one writer continues; the gate of prod, whose checks are pure functions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.models.versions import ModelVersion, open_registry, resolve
from headway.registry.aliases import next_change, put_change
from headway.registry.gate import (
    GateSettings,
    check_benchmarks,
    check_comparison,
    check_ledger,
    run_gate,
)
from headway.registry.verify import verify_model
from headway.registry.who import audit
from support.registry import PROVEN, registry_with


def _version(number: int = 1, **evidence: object) -> ModelVersion:
    return ModelVersion("model", number, 0.0, "me@here", {}, {}, evidence)


def test_an_alias_keeps_its_history(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=2)
    before = None
    for number in (1, 2, 1):
        version = registry.required("model", number)
        put_change(registry, next_change(before, "model", "candidate", version))
        before = registry.present("model", "candidate")
    put_change(registry, next_change(before, "model", "candidate", None))
    changes = [registry.change("model", "candidate", number) for number in registry.changes("model", "candidate")]
    assert [change and change.number for change in changes] == [1, 2, 1, None]
    assert list(verify_model(registry, "model")) == []
    with pytest.raises(ConfigError, match="no alias 'candidate'"):
        resolve("model@candidate", registry)


def test_of_two_changes_decided_at_once_one_is_refused(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=2)
    before = registry.present("model", "prod")
    put_change(registry, next_change(before, "model", "prod", registry.required("model", 1)))
    with pytest.raises(ConfigError, match=r"was changed meanwhile, by .*@.*, to version 1"):
        put_change(registry, next_change(before, "model", "prod", registry.required("model", 2)))
    assert resolve("model@prod", registry).number == 1


@pytest.mark.parametrize(
    ("ledger", "passed", "words"),
    [
        (PROVEN, True, "proven for 10 steps, 80 rows"),
        ({**PROVEN, "proven": False, "problems": ["row 3 twice"]}, False, "row 3 twice"),
        ({"proven": "yes"}, False, "not proven"),
        (None, False, "comes from no run"),
    ],
)
def test_only_a_proven_ledger_passes(ledger: object, passed: bool, words: str) -> None:
    check = check_ledger(_version(ledger=ledger))
    assert check.passed is passed and words in check.what


@pytest.mark.parametrize(
    ("ours", "theirs", "passed"),
    [
        ({"arc": {"acc": 0.5}}, {"arc": {"acc": 0.5}}, True),
        ({"arc": {"acc": 0.49}}, {"arc": {"acc": 0.5}}, False),
        ({"wiki": {"word_perplexity": 9.0}}, {"wiki": {"word_perplexity": 10.0}}, True),
        ({"wiki": {"word_perplexity": 11.0}}, {"wiki": {"word_perplexity": 10.0}}, False),
        ({}, {"arc": {"acc": 0.5}}, False),
        ({"new": {"acc": 0.1}}, {}, True),
    ],
)
def test_no_benchmark_may_be_below(ours: object, theirs: object, passed: bool) -> None:
    check = check_benchmarks(_version(2, benchmarks=ours), _version(1, benchmarks=theirs))
    assert check.passed is passed


@pytest.mark.parametrize("found", [{}, {"non_inferior": "yes"}, {"non_inferior": None}, {"non_inferior": False}])
def test_only_a_shown_non_inferiority_passes(found: dict[str, object]) -> None:
    assert not check_comparison(found, "model@1", "1%").passed
    good = {"non_inferior": True, "effect": -0.01, "interval": [-0.02, 0.003]}
    assert check_comparison(good, "model@1", "1%").passed


def test_the_gate_verifies_and_names_what_is_missing(tmp_path: Path) -> None:
    registry = registry_with(tmp_path, versions=2, evidence={"ledger": PROVEN})
    found = resolve("model@2", registry)
    assert [(check.name, check.passed) for check in run_gate(found, None, GateSettings())] == [
        ("files", True),
        ("ledger", True),
    ]
    put_change(registry, next_change(None, "model", "prod", registry.required("model", 1)))
    before = registry.present("model", "prod")
    against = run_gate(found, before, GateSettings())
    assert [check.name for check in against] == ["files", "ledger", "benchmarks", "comparison"]
    assert "--data STORE" in against[-1].what and not against[-1].passed
    (tmp_path / "registry/model/files" / found.version.fingerprint / "config.json").write_text("{}", encoding="utf-8")
    assert [check.name for check in run_gate(found, before, GateSettings()) if check.passed] == ["ledger", "benchmarks"]


def test_a_lost_version_can_be_replaced_with_a_reason(tmp_path: Path) -> None:
    """The gate refuses, since there is nothing to compare with, but does not fail."""
    registry = registry_with(tmp_path, versions=2, evidence={"ledger": PROVEN})
    put_change(registry, next_change(None, "model", "prod", registry.required("model", 2)))
    (tmp_path / "registry/model/versions/00000002.json").write_bytes(b"{}")
    checks = run_gate(resolve("model@1", registry), registry.present("model", "prod"), GateSettings())
    assert [(check.name, check.passed) for check in checks] == [("files", True), ("ledger", True), ("present", False)]


@pytest.mark.parametrize("what", ["change gone", "change flipped", "change replaced", "version gone", "stray"])
def test_verify_finds_what_was_done_to_records(tmp_path: Path, what: str) -> None:
    registry = registry_with(tmp_path, versions=3)
    before = None
    for number in (1, 2, 3):
        put_change(registry, next_change(before, "model", "prod", registry.required("model", number)))
        before = registry.present("model", "prod")
    folder = tmp_path / "registry" / "model"
    second = folder / "aliases/prod/00000002.json"
    if what == "change gone":
        second.unlink()
    elif what == "change flipped":
        second.write_bytes(second.read_bytes().replace(b'"number": 2', b'"number": 3'))
    elif what == "change replaced":
        change = registry.change("model", "prod", 2)
        assert change is not None
        second.write_bytes(replace(change, by="somebody@else").render())
    elif what == "version gone":
        (folder / "versions/00000002.json").unlink()
    else:
        (folder / "versions/notes.txt").write_text("hello", encoding="utf-8")
    found = list(verify_model(open_registry(tmp_path / "registry"), "model"))
    assert any(finding.kind == "damage" for finding in found), found


def test_the_audit_log_says_who_did_what_and_verify_reads_it(tmp_path: Path) -> None:
    registry = registry_with(tmp_path)
    for version in (1, 2):
        audit(registry, "model", "registry alias", alias="prod", version=version)
    log = tmp_path / "registry/model/audit.jsonl"
    assert [json.loads(line)["version"] for line in log.read_text(encoding="utf-8").splitlines()] == [1, 2]
    assert list(verify_model(registry, "model")) == []
    log.write_bytes(log.read_bytes().replace(b'"version":1', b'"version":3'))
    assert [finding.where for finding in verify_model(registry, "model")] == ["model/audit.jsonl"]

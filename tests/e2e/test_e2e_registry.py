"""From a run to a version that others load: evidence, the gate of prod, a card, a copy with the run's tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.registry.sources import ranked_steps
from headway.run.directory.ledger_proof import prove
from headway.telemetry.record import open_run
from support.runs import headway, write_config


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ten steps with checkpoints of the steps 6, 8 and 10; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    config = write_config(folder, data=data, evaluation={"rows": 8, "every": "2 steps"})
    assert headway("train", config).returncode == 0
    return folder / "runs" / "tiny"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, and an empty registry in the environment."""
    monkeypatch.setenv("HEADWAY_REGISTRY", str(tmp_path / "registry"))
    return trained


def answer(*words: str) -> Any:
    done = headway(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_becomes_a_version_with_its_evidence(run: Path, tmp_path: Path) -> None:
    added = answer("registry", "add", str(run), "--name", "tiny")
    assert (added["number"], added["new"]) == (1, True)
    shown = answer("registry", "show", "tiny@1")
    record, proof = open_run(run), prove(run)
    evidence = shown["evidence"]
    assert evidence["ledger"]["proven"] is True and evidence["ledger"]["rows"] == proof.rows == 80
    assert evidence["metrics"]["evaluation/loss"] == record.metrics.last("evaluation/loss")
    assert evidence["config"]["optimizer"]["learning_rate"] == 0.01
    assert evidence["data"]["fingerprints"] == record.facts["fingerprints"]
    checkpoint = record.checkpoints[-1]
    assert (shown["source"]["step"], shown["source"]["state_sha256"]) == (checkpoint.step, checkpoint.state_sha256)
    prompt = ("-n", "12", "--temperature", "0", "red green")
    folder = answer("registry", "pull", "tiny@1")["path"]
    assert headway("generate", str(run), *prompt).stdout == headway("generate", folder, *prompt).stdout
    copy = tmp_path / "copy"
    assert headway("registry", "pull", "tiny", str(copy)).returncode == 0
    assert {path.name for path in copy.iterdir()} == set(shown["files"])
    card = headway("registry", "card", "tiny@1").stdout
    assert "| steps | 10 |" in card and "| ledger | proven |" in card and "| licence | n/a |" in card
    assert "registry add" in headway("audit", "show", str(run)).stdout
    assert "registry add" in headway("audit", "show", str(tmp_path / "registry" / "tiny")).stdout


def test_the_best_checkpoint_is_the_one_of_least_loss(run: Path) -> None:
    record = open_run(run)
    losses = dict(zip(*(series.tolist() for series in record.metrics.finite("evaluation/loss")), strict=True))
    assert ranked_steps(record)[0] == min((losses[one.step], one.step) for one in record.checkpoints)[1]


@pytest.mark.slow
def test_prod_is_set_through_the_gate_only(run: Path, tmp_path: Path) -> None:
    """A worse version, and one whose ledger is not proven, are refused; a reason that is given is kept."""
    answer("registry", "add", str(run), "--name", "tiny")
    answer("registry", "add", str(run), "--name", "tiny", "--step", "6")
    assert headway("registry", "alias", "tiny@1", "prod").returncode == 0
    worse = headway("registry", "alias", "tiny@2", "prod", "--margin", "1%")
    assert worse.returncode == 2 and "comparison" in worse.stderr
    within = answer("registry", "alias", "tiny@2", "prod", "--margin", "60%")
    assert within["checks"]["comparison"]["passed"] is True
    other = tmp_path / "other"
    shutil.copytree(run, other)
    ledger = other / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text(encoding="utf-8").splitlines(keepends=True)[1:]), encoding="utf-8")
    answer("registry", "add", str(other), "--name", "tiny")
    refused = headway("registry", "alias", "tiny@3", "prod", "--margin", "60%")
    assert refused.returncode == 2 and "ledger: the ledger of its run is not proven" in refused.stderr
    assert headway("registry", "alias", "tiny@3", "prod", "--force", "a drill").returncode == 0
    history = answer("registry", "alias", "tiny", "prod")
    assert [(one["number"], one["forced"]) for one in history] == [(1, None), (2, None), (3, "a drill")]
    assert history[2]["checks"]["ledger"]["passed"] is False
    assert headway("registry", "verify").returncode == 0

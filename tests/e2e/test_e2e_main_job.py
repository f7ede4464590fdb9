"""The way of a new user: text in, trained model out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.runs import headway, write_config, write_corpus


def test_from_text_to_exported_model(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    config = write_config(
        tmp_path,
        train={"steps": 60},
        checkpoint={"every": "20 steps"},
        evaluation={"every": "20 steps"},
        telemetry={"report": True},
    )
    assert headway("data", "prepare", config).returncode == 0
    trained = headway("train", config)
    assert trained.returncode == 0, trained.stderr
    assert "step 60/60 · loss" in trained.stderr
    run = tmp_path / "runs" / "tiny"
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "report.html",
        "attempts/001/worker-0.log",
    ):
        assert (run / name).stat().st_size > 0, name

    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in metrics if "train/loss" in record]
    assert len(losses) == 60
    assert losses[0] > 5.0 and losses[-1] < 3.0, "the text can be learned, so the loss must fall"
    evaluations = [record["evaluation/loss"] for record in metrics if "evaluation/loss" in record]
    assert len(evaluations) == 3 and evaluations[-1] < evaluations[0]

    evaluated = headway("eval", run, "--json")
    assert json.loads(evaluated.stdout)["loss"] < 3.2
    sampled = headway("generate", run, "--prompt", "3: red", "--max-new-tokens", "12", "--temperature", "0")
    assert sampled.stdout.startswith("3: red") and len(sampled.stdout) > len("3: red") + 5
    assert sampled.stdout == headway("generate", run, "-p", "3: red", "-n", "12", "--temperature", "0").stdout

    assert headway("export", run, tmp_path / "exported").returncode == 0
    _same_logits_in_transformers(run, tmp_path / "exported")
    again = headway("eval", tmp_path / "exported", "--store", tmp_path / "store", "--sequence-length", "32", "--json")
    assert json.loads(again.stdout)["loss"] == pytest.approx(json.loads(evaluated.stdout)["loss"], abs=1e-5)


def _same_logits_in_transformers(run: Path, exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headway.training.evaluation.inference import load_trained

    ours = load_trained(run)
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    text = "7: blue seven over red"
    ids = AutoTokenizer.from_pretrained(exported)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.tokenizer.encode_batch([text])[0]
    with torch.no_grad():
        torch.testing.assert_close(ours.model(ids), theirs(ids).logits, atol=1e-5, rtol=0)


def test_a_resolved_config_gives_the_same_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from support.runs import state_hash

    assert headway("train", tiny()).returncode == 0
    resolved = tmp_path / "runs" / "tiny" / "config.yaml"
    assert headway("train", resolved, "name=again").returncode == 0
    assert state_hash(tmp_path / "runs" / "again") == state_hash(tmp_path / "runs" / "tiny")


def test_the_ledger_accounts_for_every_row(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    headway("train", config, faults="kill@step=5")
    assert headway("train", config).returncode == 0
    from headway.run.directory.ledger import Ledger

    commits = Ledger(tmp_path / "runs" / "tiny" / "ledger.jsonl").commits()
    steps = [(commit.first_step, commit.last_step) for commit in commits]
    assert steps == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]
    assert sum(sum(commit.rows.values()) for commit in commits) == 10 * 8


def test_dry_run_says_what_would_happen_and_touches_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = headway("train", tiny(), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "10 steps" in result.stdout and "(new)" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_has_nothing_left_to_do(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    assert headway("train", config).returncode == 0
    before = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_bytes()
    result = headway("train", config)
    assert result.returncode == 0 and "is finished" in result.stderr
    assert (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_bytes() == before


def test_a_changed_config_is_refused_until_it_is_accepted(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    headway("train", config, faults="kill@step=5")
    refused = headway("train", config, "optimizer.learning_rate=0.5")
    assert refused.returncode == 2
    assert "optimizer.learning_rate was 0.01 and is now 0.5" in refused.stderr
    accepted = headway("train", config, "optimizer.learning_rate=0.02", "--accept-changes")
    assert accepted.returncode == 0 and "changed config" in accepted.stderr


def test_restart_keeps_the_earlier_run(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny()
    assert headway("train", config).returncode == 0
    assert headway("train", config, "seed=9", "--restart").returncode == 0
    assert (tmp_path / "runs" / "tiny.old-001" / "checkpoints").is_dir()


def test_python_api(tiny: Callable[..., Path]) -> None:
    import headway as package

    run = package.train(package.load_config(tiny(), ["train.steps=4", "train.activation_checkpointing=full"]))
    assert run.step == 4
    assert run.loss is not None and run.validation_loss is not None


@pytest.mark.parametrize("option", ["train.precision=bf16", "train.activation_checkpointing=full"])
def test_options_train(tiny: Callable[..., Path], option: str) -> None:
    result = headway("train", tiny(), "train.steps=3", option)
    assert result.returncode == 0, result.stderr

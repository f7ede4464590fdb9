"""A task of the user's own from the command line: its examples learn, kills cost nothing, and its code travels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from headway.telemetry.metrics import read_metrics
from support.runs import headway, state_hash

EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
ELASTIC = ("determinism=elastic", "train.device=cpu", "telemetry.report=false", "checkpoint.keep_best=0")


def train(
    folder: Path, name: str, *overrides: str, task: str = "shapes", faults: str = "", cwd: Path = EXAMPLES
) -> Path:
    done = headway(
        "train", f"{task}.yaml", f"runs={folder}", f"name={name}", *ELASTIC, *overrides, faults=faults, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return folder / name


@pytest.mark.parametrize(
    ("task", "metric", "at_least"),
    [("shapes", "evaluation/accuracy", 0.85), ("tagger", "evaluation/f1", 0.7)],
)
def test_an_example_learns(tmp_path: Path, task: str, metric: str, at_least: float) -> None:
    run = train(tmp_path, "run", "train.steps=60", "evaluation.every=30 steps", task=task)
    assert (read_metrics(run).last(metric) or 0.0) > at_least


def test_the_diffusion_example_learns(tmp_path: Path) -> None:
    run = train(
        tmp_path, "run", "train.steps=60", "evaluation.every=30 steps", "checkpoint.every=20 steps", task="diffusion"
    )
    parts = read_metrics(run).series("train/losses/noise")[1]
    assert parts[-10:].mean() < 0.7 * parts[:3].mean()


def test_kills_workers_and_processes_change_no_bit(tmp_path: Path) -> None:
    steps = ("train.steps=16", "checkpoint.every=4 steps", "evaluation.every=8 steps", "train.ema=0.9")
    alone = state_hash(train(tmp_path, "alone", *steps))
    workers = ("parallel.workers=2", "data.processes=2")
    killed = train(tmp_path, "killed", *steps, *workers, faults="kill@backward=6%0")
    assert state_hash(killed) == alone
    assert len(list((killed / "attempts").iterdir())) == 2
    proof = headway("ledger", killed)
    assert proof.returncode == 0, proof.stdout + proof.stderr


def test_sources_travel_with_a_launch(tmp_path: Path) -> None:
    """What a pod gets trains in an empty folder, to the same bits and as the same code."""
    volumes = "launch.kubernetes.volumes=[{claim: runs, mount: /runs}]"
    launch = ("launch", "shapes.yaml", "--on", "kubernetes", "--dry-run", "launch.image=registry/lab:1", "runs=/runs")
    shown = headway(*launch, volumes, *ELASTIC, "train.steps=6", cwd=EXAMPLES)
    assert shown.returncode == 0, shown.stderr
    documents = yaml.safe_load_all("\n".join(line for line in shown.stdout.splitlines() if not line.startswith("# ")))
    maps = [document for document in documents if document and document["kind"] == "ConfigMap"]
    away = tmp_path / "away"
    away.mkdir()
    (away / "sent.yaml").write_text(maps[0]["data"]["config.yaml"])
    there = train(tmp_path, "there", task="sent", cwd=away)
    here = train(tmp_path, "here", "train.steps=6")
    assert state_hash(there) == state_hash(here)
    codes = [
        json.loads(next(run.glob("checkpoints/*/manifest.json")).read_text())["context"]["code"]
        for run in (here, there)
    ]
    assert codes[0] == codes[1]
    assert set(codes[0]) == {"task"}


def test_other_code_does_not_continue_a_run(tmp_path: Path) -> None:
    for name in ("shapes.py", "shapes.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    run = train(tmp_path, "run", "train.steps=4", cwd=tmp_path)
    before = state_hash(run)
    source = tmp_path / "shapes.py"
    source.write_text(source.read_text().replace("0.4,", "0.5,"))
    arguments = ("shapes.yaml", f"runs={tmp_path}", "name=run", *ELASTIC, "train.steps=8", "--accept-changes")
    refused = headway("train", *arguments, cwd=tmp_path)
    assert refused.returncode == 3
    assert "the source of the task has changed" in refused.stderr
    assert state_hash(run) == before


def test_other_verbs_know_a_task(tmp_path: Path) -> None:
    run = train(tmp_path, "run", "train.steps=4")
    dry_run = ("train", "shapes.yaml", f"runs={tmp_path}", "--dry-run", "train.device=cpu", "data.processes=2")
    dry = headway(*dry_run, cwd=EXAMPLES)
    assert "task       shapes:build: 4,996 parameters" in dry.stdout
    assert "steps of 64 samples:" in dry.stdout and "2 processes per worker" in dry.stdout
    assert "config check" not in headway("config", "check", "shapes.yaml", cwd=EXAMPLES).stderr
    planned = headway("plan", "shapes.yaml", "train.device=cpu", "--json", cwd=EXAMPLES)
    facts = json.loads(planned.stdout)
    assert facts["samples"] == 12_800 and facts["samples_per_second"] > 0 and facts["peak_memory_bytes"] > 0
    elsewhere = headway("plan", "shapes.yaml", "--gpus", "8xH100", cwd=EXAMPLES)
    assert elsewhere.returncode == 2 and "--gpus cannot be known here" in elsewhere.stderr
    prepare = headway("data", "prepare", "shapes.yaml", cwd=EXAMPLES)
    assert prepare.returncode == 2 and "is for language models" in prepare.stderr
    for verb in ("chat", "eval", "export"):
        refused = headway(verb, run)
        assert refused.returncode == 2 and "module of your own" in refused.stderr
    flow = headway("launch", "shapes.yaml", "--on", "metaflow", "--dry-run", cwd=EXAMPLES)
    assert flow.returncode == 2 and "task of its own" in flow.stderr

"""A run that begins from another run's checkpoint: what it becomes, and what its ledger proves without the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.checkpoint.format.manifest import read_manifest
from headway.config import load_resolved
from headway.run.directory.beginning import begin as begin_run
from headway.run.directory.beginning import config_at_beginning, find_parent
from headway.run.directory.ledger import Ledger
from headway.run.directory.ledger_proof import prove
from headway.run.directory.run_directory import RunDirectory
from headway.telemetry.record import open_run
from support.runs import config_values, headway, state_hash, write_corpus

RATE = "optimizer.learning_rate=0.003"


@pytest.fixture(scope="module")
def made(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A run of ten steps on two sources, with the checkpoints of all even steps."""
    return made_once("begin-from", _train)


def _train(folder: Path) -> None:
    write_corpus(folder)
    write_corpus(folder / "more", documents=30)
    sources = [
        {"path": str(folder / "corpus.jsonl"), "weight": 3},
        {"path": str(folder / "more" / "corpus.jsonl"), "name": "more", "weight": 1, "max_epochs": 6},
    ]
    values = config_values(folder, name="parent", data={"sources": sources}, checkpoint={"keep": 9})
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    assert headway("data", "prepare", folder / "config.yaml").returncode == 0
    assert headway("train", folder / "config.yaml").returncode == 0


@pytest.fixture
def begin(made: Path, tmp_path: Path) -> Callable[..., Any]:
    """Trains a run in this test's folder that begins from the parent, or from another run."""

    def train(name: str, *words: str, step: int = 4, parent: Path | None = None, faults: str = "") -> Any:
        place = [f"name={name}", f"runs={tmp_path}"]
        source = ["--from", str(parent or made / "runs/parent"), "--step", str(step)]
        return headway("train", made / "config.yaml", *place, *source, *words, faults=faults)

    return train


def test_a_child_without_a_change_becomes_what_its_parent_became(
    begin: Callable[..., Any], made: Path, tmp_path: Path
) -> None:
    parent = Path(shutil.copytree(made / "runs/parent", tmp_path / "parent"))
    done = begin("child", parent=parent)
    assert done.returncode == 0 and "begins from step 4 of run 'parent'" in done.stderr, done.stderr
    assert state_hash(tmp_path / "child") == state_hash(made / "runs/parent")
    assert load_resolved(tmp_path / "child/config.yaml").segments == []
    shutil.rmtree(parent)
    proof = prove(tmp_path / "child")
    assert proof.problems == [] and proof.steps == 10 and proof.rows == prove(made / "runs/parent").rows
    (begun,) = proof.beginnings
    assert (begun.step, begun.run["name"]) == (4, "parent")
    assert begun.run["id"] == open_run(made / "runs/parent").facts["id"] != open_run(tmp_path / "child").facts["id"]
    assert any("steps 0 to 3 are those of run 'parent'" in line for line in proof.basis)
    # The same command continues the run, also when the other one is gone.
    again = begin("child", "train.steps=12", "--accept-changes", parent=parent)
    assert again.returncode == 0 and "resuming from" in again.stderr, again.stderr
    other = begin("child", step=6, parent=parent)
    assert other.returncode == 2 and "has begun from step 4 of run 'parent'" in other.stderr
    assert headway("ledger", tmp_path / "child").returncode == 0


def test_a_changed_rate_is_a_segment_and_moves_no_row(begin: Callable[..., Any], made: Path, tmp_path: Path) -> None:
    refused = begin("child", RATE)
    assert refused.returncode == 2 and "optimizer.learning_rate was 0.01 and is now 0.003" in refused.stderr
    few = begin("child", "train.steps=3", "--accept-changes")
    assert few.returncode == 2 and "the run has done 4 steps; train.steps=3 is fewer" in few.stderr
    assert list(tmp_path.iterdir()) == []
    killed = begin("child", RATE, "--accept-changes", faults="kill@step=5")
    assert killed.returncode != 0 and "died" in killed.stderr
    done = begin("child", RATE)
    assert done.returncode == 0, done.stderr
    segments = load_resolved(tmp_path / "child/config.yaml").segments
    assert [segment.first_step for segment in segments] == [0, 4]
    assert segments[1].changes == ["optimizer.learning_rate was 0.01 and is now 0.003"]
    assert [start.segment["changes"] for start in Ledger(tmp_path / "child/ledger.jsonl").segments()][1:] == [
        segments[1].changes
    ]
    # The parent, set back to that step and continued with the same change, takes the way of every changed run.
    shutil.copytree(made / "runs/parent", tmp_path / "parent")
    assert headway("checkpoints", "restore", tmp_path / "parent", "--step", "4").returncode == 0
    changed = headway("train", made / "config.yaml", f"runs={tmp_path}", RATE, "--accept-changes")
    assert changed.returncode == 0, changed.stderr
    assert state_hash(tmp_path / "child") == state_hash(tmp_path / "parent") != state_hash(made / "runs/parent")
    assert prove(tmp_path / "child").problems == []


@pytest.mark.slow
def test_a_run_of_the_third_generation_proves_the_rows_of_all(
    begin: Callable[..., Any], made: Path, tmp_path: Path
) -> None:
    assert begin("child", RATE, "--accept-changes").returncode == 0
    done = begin("grandchild", "train.global_batch=4", "--accept-changes", step=8, parent=tmp_path / "child")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "child")
    proof = prove(tmp_path / "grandchild")
    assert proof.problems == [] and proof.rows == 8 * 8 + 2 * 4
    assert [begun.step for begun in proof.beginnings] == [4, 8]
    assert [start.first_step for start in proof.segments] == [0, 4, 8]


def test_a_ledger_that_was_forged_or_mixed_proves_nothing(
    begin: Callable[..., Any], made: Path, tmp_path: Path
) -> None:
    other = headway("train", made / "config.yaml", "name=other", f"runs={tmp_path}", RATE, "train.steps=4")
    assert other.returncode == 0, other.stderr
    assert begin("child", "train.steps=6", "--accept-changes").returncode == 0
    mixed, child = RunDirectory(tmp_path / "mixed"), tmp_path / "child"
    begin_run(mixed, find_parent(tmp_path / "other"), "a test")
    ledger = (child / "ledger.jsonl").read_text()
    assert prove(child).problems == [] == prove(mixed.path).problems

    def problems_with(text: str) -> str:
        (child / "ledger.jsonl").write_text(text)
        return "; ".join(prove(child).problems)

    lines = [json.loads(line) for line in ledger.splitlines()]
    lines[0]["rows"]["corpus"] += 1
    forged = problems_with("".join(json.dumps(line) + "\n" for line in lines))
    assert "has other lines up to step 4 than were copied" in forged
    assert "gap or an overlap" in problems_with("".join(ledger.splitlines(keepends=True)[1:]))
    of_other = problems_with(mixed.ledger_path.read_text())
    assert "step-00000004 is not the checkpoint that the run began from" in of_other
    assert "step-00000006 was trained from another state of step 4" in of_other
    assert config_at_beginning(mixed, 4) is not None and config_at_beginning(mixed, 6) is None
    (mixed.attempts / "001/config.yaml").unlink()
    assert config_at_beginning(mixed, 4) is None, "as on another disk, whose records have no configs"
    shutil.rmtree(child / "checkpoints/step-00000004")
    shutil.copytree(mixed.checkpoints / "step-00000004", child / "checkpoints/step-00000004")
    assert "its manifest has another hash" in problems_with(ledger)


def test_a_kill_while_a_run_begins_leaves_nothing_half_made(
    begin: Callable[..., Any], made: Path, tmp_path: Path
) -> None:
    killed = begin("child", faults="kill@begin.rename")
    assert killed.returncode == -9, killed.stderr
    assert not (tmp_path / "child").exists() and len(list(tmp_path.iterdir())) == 1
    assert json.loads(headway("runs", "list", tmp_path, "--json").stdout) == []
    done = begin("child")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["child"], "what the kill has left is removed"
    assert prove(tmp_path / "child").problems == []


@pytest.mark.slow
def test_several_workers_begin_from_a_checkpoint_of_several(
    made: Path, begin: Callable[..., Any], tmp_path: Path
) -> None:
    place = ["name=pair", f"runs={tmp_path}", "--workers", "2"]
    assert headway("train", made / "config.yaml", *place).returncode == 0
    done = begin("child", "--workers", "2", step=6, parent=tmp_path / "pair")
    assert done.returncode == 0, done.stderr
    assert state_hash(tmp_path / "child") == state_hash(tmp_path / "pair")
    assert prove(tmp_path / "child").problems == []


@pytest.mark.slow
def test_a_parent_whose_ledger_does_not_reach_the_checkpoint_is_not_vouched_for(
    begin: Callable[..., Any], made: Path, tmp_path: Path
) -> None:
    parent = Path(shutil.copytree(made / "runs/parent", tmp_path / "parent"))
    lines = [
        line for line in (parent / "ledger.jsonl").read_text().splitlines(keepends=True) if '"last_step":4' not in line
    ]
    (parent / "ledger.jsonl").write_text(lines[0])
    done = begin("child", parent=parent)
    assert done.returncode == 0, done.stderr
    proof = prove(tmp_path / "child")
    assert proof.problems == [], proof.problems
    assert any("whose ledger did not reach it" in line for line in proof.basis)
    assert any("steps 0 to 3 were trained elsewhere" in line for line in proof.basis)


@pytest.mark.slow
def test_restoring_a_run_into_a_new_one_is_the_same_beginning(made: Path, tmp_path: Path) -> None:
    restored = headway("checkpoints", "restore", tmp_path / "child", "--from", made / "runs/parent", "--step", "6")
    assert restored.returncode == 0, restored.stderr
    assert read_manifest(tmp_path / "child/checkpoints/step-00000006").step == 6
    assert headway("ledger", tmp_path / "child").returncode == 0
    done = headway("train", made / "config.yaml", "name=child", f"runs={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert state_hash(tmp_path / "child") == state_hash(made / "runs/parent")
    assert [begun.step for begun in prove(tmp_path / "child").beginnings] == [6]

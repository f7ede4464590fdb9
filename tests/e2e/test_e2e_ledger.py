"""`headway ledger` proves a run that was killed and set back, and finds what was changed in a ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import LaneGrid, load_resolved
from headway.data.feeding.token_feed import TokenFeed
from headway.data.pinned import open_run_store
from headway.run.directory.ledger_proof import prove
from support.made_of import MADE_OF, made_of
from support.runs import config_values, headway, state_hash, write_corpus

Change = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def run(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A mixture of two sources with stages; killed after step 5, then set back to step 6 from step 8."""
    return made_once("ledger", _train) / "runs" / "tiny"


def _train(folder: Path) -> None:
    write_corpus(folder)
    write_corpus(folder / "more", documents=30)
    sources = [
        {"path": str(folder / "corpus.jsonl"), "weight": 3},
        {"path": str(folder / "more" / "corpus.jsonl"), "name": "more", "weight": 1, "max_epochs": 6},
    ]
    stages = [{"start": 0.5, "weights": {"corpus": 1, "more": 1}, "sequence_length": 16}]
    values = config_values(folder, data={"sources": sources, "mixture": {"stages": stages}})
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    assert headway("data", "prepare", config).returncode == 0
    assert headway("train", config, faults="kill@step=5").returncode != 0
    # Told to stop, it ends when step 8 is saved and the ledger knows it.
    assert headway("train", config, faults="stop@step=7").returncode == 75
    run = folder / "runs" / "tiny"
    shard = next((run / "checkpoints" / "step-00000008").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert headway("train", config, "--workers", "2").returncode == 0


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "tiny"))


def rewrite(run: Path, change: Change) -> None:
    file = run / "ledger.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_proven_whatever_died_on_the_way(run: Path) -> None:
    result = headway("ledger", run, "--json")
    assert result.returncode == 0, result.stderr
    proof = json.loads(result.stdout)
    assert (proof["proven"], proof["steps"], proof["rows"], proof["looked_at_rows"]) == (True, 10, 120, 120)
    assert [(c["first_step"], c["last_step"], c["attempt"]) for c in proof["commits"]] == [
        (0, 2, 1),
        (2, 4, 1),
        (4, 6, 2),
        (6, 8, 3),
        (8, 10, 3),
    ]
    (rollback,) = proof["rollbacks"]
    assert [(c["first_step"], c["attempt"]) for c in rollback["struck"]] == [(6, 2)]
    used = {(e["source"], e["first_step"]): e["used"] for e in proof["epochs"]}
    assert used == {("corpus", 0): 30, ("more", 0): 10, ("corpus", 5): 40, ("more", 5): 40}
    assert all(e["sound"] for e in proof["epochs"])
    text = headway("ledger", run)
    assert "proven for steps 0 to 9, 120 rows" in text.stdout
    assert "what training calls step 1 is step 0" in text.stdout
    assert "rolled back: steps 6 to 7 of attempt 2" in text.stdout
    counted = headway("ledger", run, "--counts-only", "--json")
    assert counted.returncode == 0 and json.loads(counted.stdout)["looked_at_rows"] == 0
    assert json.loads(counted.stdout)["epochs"] == proof["epochs"]


def _not_taken_back(lines: list[dict[str, Any]]) -> None:
    """As if nobody had told the ledger that attempt 3 went back to step 6."""
    again = {"kind": "commit", "attempt": 3, "first_step": 6}
    lines[:] = [line for line in lines if line["kind"] != "rollback" and not again.items() <= line.items()]


def _gap(lines: list[dict[str, Any]]) -> None:
    del lines[1]


def _overlap(lines: list[dict[str, Any]]) -> None:
    lines[1]["first_step"] = 1


def _end(lines: list[dict[str, Any]]) -> None:
    del lines[-1]


def _counts(lines: list[dict[str, Any]]) -> None:
    lines[0]["rows"] = {"corpus": 11, "more": 5}


def _attempt(lines: list[dict[str, Any]]) -> None:
    lines[0]["attempt"] = 2


def _unknown_attempt(lines: list[dict[str, Any]]) -> None:
    lines[-1]["attempt"] = 7


def _earlier_attempt(lines: list[dict[str, Any]]) -> None:
    lines[-1]["attempt"] = 2


def _checkpoint(lines: list[dict[str, Any]]) -> None:
    lines[0]["checkpoint"] = "step-00000004"


def _plan(lines: list[dict[str, Any]]) -> None:
    lines[0]["plan"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_not_taken_back, "attempt 3 did steps 6 to 7 again, which the ledger still records from before"),
        (_gap, "gap or an overlap before step 4"),
        (_overlap, "gap or an overlap before step 1"),
        (_end, "step-00000010 is not in the ledger, which ends at step 8"),
        (_counts, "steps 0 to 1: the ledger counts 11 of corpus, 5 of more, the plan has 12 of corpus, 4 of more"),
        (_attempt, "steps 0 to 1 are recorded for attempt 2, which did steps 4 to"),
        (_unknown_attempt, "attempt 7, which the run never had"),
        (_earlier_attempt, "steps 8 to 9 are recorded for attempt 2"),
        (_checkpoint, "step-00000004, which is of another step"),
        (_plan, "another plan of rows"),
    ],
)
def test_a_ledger_that_was_changed_is_not_proven(copy: Path, change: Change, message: str) -> None:
    rewrite(copy, change)
    result = headway("ledger", copy)
    assert result.returncode == 4
    assert message in result.stderr, result.stderr
    assert "proven for" not in result.stdout


def test_what_is_missing_or_another_is_not_proven(copy: Path, tmp_path: Path) -> None:
    config = copy / "config.yaml"
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**values, "seed": 4}))
    other = headway("ledger", copy)
    assert other.returncode == 4 and "another plan of rows" in other.stderr
    config.write_text(yaml.safe_dump({**values, "data": {**values["data"], "store": str(tmp_path / "gone")}}))
    gone = headway("ledger", copy)
    assert gone.returncode == 4 and "cannot be recomputed: there is no token store here" in gone.stderr
    assert headway("ledger", copy, "--store", values["data"]["store"]).returncode == 0
    shutil.rmtree(copy / "checkpoints" / "step-00000010")
    back = headway("ledger", copy, "--store", values["data"]["store"])
    assert back.returncode == 4 and "goes up to checkpoint step-00000010, but the newest is of step 8" in back.stderr
    assert headway("ledger", tmp_path).returncode == 4


@pytest.mark.parametrize("kind", MADE_OF)
def test_a_run_of_a_model_or_a_teacher_is_proven(kind: str, corpus: Path, tmp_path: Path) -> None:
    """Also by a ledger whose fingerprints of plans hold all that the task is made of, as they did once."""
    if kind == "adapter":
        pytest.importorskip("peft")
    data = {"store": str(corpus / "store"), "sources": [str(corpus / "corpus.jsonl")]}
    values = config_values(tmp_path, data=data, train={"steps": 4})
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**values, **made_of(kind, tmp_path / "model", corpus / "store" / "tokenizer")}))
    killed = headway("train", config, faults="kill@step=3")
    assert killed.returncode == 1, killed.stderr
    resumed = headway("train", config)
    assert resumed.returncode == 0 and "resuming from" in resumed.stderr, resumed.stderr
    run = tmp_path / "runs" / "tiny"
    proven = headway("ledger", run)
    assert proven.returncode == 0 and "proven for steps 0 to 3, 32 rows" in proven.stdout, proven.stderr
    task = json.loads((run / "run.json").read_text())["fingerprints"]
    del task["config"]
    assert task.keys() == {"data", "tokenizer", "teacher" if kind == "teacher" else "pretrained"}
    settled = load_resolved(run / "config.yaml")
    feed = TokenFeed.of(
        settled.row_settings, LaneGrid(1, 1, 1), open_run_store(settled.data, settled.run_directory, settled.segments)
    )

    def fingerprint_all(lines: list[dict[str, Any]], **others: str) -> None:
        for line in (line for line in lines if line["kind"] == "commit"):
            plan = {"data": {**task, **others}, "plan": feed.describe(line["last_step"])}
            line["plan"] = sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    rewrite(run, fingerprint_all)
    assert prove(run).problems == []
    rewrite(run, partial(fingerprint_all, data="0" * 64))
    assert len(prove(run).problems) == 2 and all("another plan of rows" in problem for problem in prove(run).problems)


def test_a_run_that_goes_on_without_its_disk_is_proven_by_what_its_checkpoint_says(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Attempts count from 1 again, and the decision to leave out rows was in the ledger that is gone."""
    (tmp_path / "remote").mkdir()
    config = tiny(
        train={"steps": 12},
        checkpoint={"every": "3 steps", "remote": {"url": f"file://{tmp_path}/remote"}},
        health={"on_nonfinite": "rollback", "leave_out_steps": 2},
    )
    stopped = headway("train", config, faults="nan@gradient=8,stop@step=9")
    assert stopped.returncode == 75, stopped.stderr
    run, old = tmp_path / "runs/tiny", tmp_path / "old"
    shutil.move(run, old)
    archives = [path for path in (tmp_path / "remote").rglob("*records*") if path.is_file()]
    assert archives
    for archive in archives:  # as in the tier of an older version, whose checkpoints had no records with them
        archive.unlink()
    again = headway("train", config)
    assert again.returncode == 0 and "downloading" in again.stderr, again.stderr
    proof = prove(run)
    assert not proof.problems and proof.skipped_ranges == [(6, 8)] and proof.rows == 80
    assert [(c.first_step, c.last_step, c.attempt) for c in proof.taken_over] == [(0, 10, 1)]
    assert "but steps 0 to 9 were trained elsewhere: only step-00000010 records that" in proof.basis[1]
    assert "taken over: steps 0 to 9 by attempt 1" in headway("ledger", run).stdout
    # Without that line, or for steps that were done here, nothing is believed.
    rewrite(run, lambda lines: lines.remove(next(line for line in lines if line.get("action") == "taken over")))
    (problem,) = prove(run).problems
    assert problem == "steps 0 to 9 are recorded for attempt 1, which did steps 10 to 11"
    commits = [line for line in map(json.loads, (old / "ledger.jsonl").open()) if line["kind"] == "commit"]
    line = {"kind": "decision", "attempt": 1, "first_step": 0, "action": "taken over", "reason": ""}
    rewrite(old, lambda lines: lines.append({**line, "last_step": commits[0]["last_step"]}))
    proof = prove(old)
    assert not proof.problems and not proof.taken_over and proof.steps == 10
    rewrite(old, lambda lines: lines[0].update(attempt=7))
    assert any("taken over by attempt 1, which began with step 0" in problem for problem in prove(old).problems)


@pytest.mark.slow
def test_a_mixture_is_the_same_on_any_number_of_workers_and_through_kills(run: Path, tmp_path: Path) -> None:
    values = yaml.safe_load((run.parents[1] / "config.yaml").read_text())
    values |= {"runs": str(tmp_path), "determinism": "elastic", "train": {**values["train"], "lanes": 4}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    for workers in (1, 2):
        assert headway("train", config, f"name=of-{workers}", "--workers", str(workers)).returncode == 0
    assert headway("train", config, "name=killed", "--workers", "2", faults="kill@step=7").returncode != 0
    assert headway("train", config, "name=killed", "--workers", "1").returncode == 0
    assert state_hash(tmp_path / "of-1") == state_hash(tmp_path / "of-2") == state_hash(tmp_path / "killed")
    proof = json.loads(headway("ledger", tmp_path / "killed", "--json").stdout)
    assert proof["proven"] and {commit["attempt"] for commit in proof["commits"]} == {1, 2}

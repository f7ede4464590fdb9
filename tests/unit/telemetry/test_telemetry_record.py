"""Reading a run directory, in whatever state it is."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
import yaml

import headway
from headway.core.errors import CheckpointError
from headway.telemetry.record import open_run
from headway.telemetry.runs import list_runs
from headway.telemetry.summary import ago_text, summarize

from .conftest import START, MakeRun, write_attempt


def test_a_run_that_died_and_went_on(make_run: MakeRun) -> None:
    run = open_run(make_run())
    first, second = run.attempts
    assert (first.outcome, first.first_step, first.last_step) == ("died", 0, 60)
    assert first.ended == START + 160, "the last sign of life"
    assert (second.outcome, second.exit_code, second.first_step, second.last_step) == ("finished", 0, 40, 100)
    assert run.outcome == "finished" and run.seconds == 160 + 100
    assert [checkpoint.step for checkpoint in run.checkpoints] == [40, 100]
    assert run.checkpoints[1].bytes == 1_000_000 and run.checkpoints[1].attempt == 1
    assert run.vocab_size == 8192 and run.tokens_per_step == 32 * 256


def test_a_run_that_was_restored_by_hand_is_where_its_checkpoint_is(make_run: MakeRun) -> None:
    path = make_run()
    write_attempt(path, 3, outcome="restored", exit_code=0, first_step=40, last_step=40)
    write_attempt(path, 4, outcome="could not restore: no checkpoint of step 7 verifies", exit_code=4)
    run = open_run(path)
    assert run.step == 40 and run.tokens == 40 * 32 * 256 and summarize(run).step == 40
    assert [listing.step for listing in list_runs(path.parent)] == [40]
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "attempt": 5, "time": START, "train/loss": 5.0}) + "\n")
    write_attempt(path, 5, outcome="preempted", exit_code=75)
    assert open_run(path).step == 41


def test_a_run_that_was_shortened_has_no_more_steps_than_it_ends_with(make_run: MakeRun) -> None:
    """An earlier attempt was killed at step 100, beyond its last checkpoint; the run then ended there, at step 90."""
    path = make_run()
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["train"]["steps"] = 90
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    write_attempt(path, 3, outcome="finished", exit_code=0)
    run = open_run(path)
    assert run.step == 90 and summarize(run).step == 90 and headway.Run(path).step == 90
    assert summarize(run).train_loss == pytest.approx(9 - math.log1p(89.5), abs=0.01)
    assert [listing.step for listing in list_runs(path.parent)] == [90]


def test_the_summary(make_run: MakeRun) -> None:
    summary = summarize(open_run(make_run()))
    assert (summary.step, summary.total_steps, summary.attempts) == (100, 100, 2)
    assert summary.tokens == 100 * 32 * 256
    assert summary.repeated_steps == 20
    assert summary.validation_loss == 5.0 and summary.best_validation_step == 100
    assert summary.perplexity == pytest.approx(148.41, abs=0.01)
    assert summary.tokens_per_second == pytest.approx(10_050.5)
    assert summary.spent_usd == 1.0
    assert summary.mfu is None and summary.peak_memory_gib is None
    assert summary.state_sha256 == f"{100:064x}"


def test_tokens_that_are_left_out_are_not_trained_on(make_run: MakeRun) -> None:
    path = make_run()
    kinds = [("rollback", 10, 12), ("rollback", 11, 14), ("rollback", 98, 105), ("skip", 20, 21)]
    lines = [{"kind": "decision", "action": a, "first_step": first, "last_step": last} for a, first, last in kinds]
    lines += [{"kind": "decision", "action": "rollback"}, {"kind": "commit", "first_step": 0, "last_step": 100}]
    (path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert open_run(path).tokens == (100 - 4 - 2) * 32 * 256


@pytest.mark.parametrize(
    ("host", "pid", "started", "outcome"),
    [
        (socket.gethostname(), os.getpid(), time.time() + 60, "running"),
        (socket.gethostname(), os.getpid(), START, "died"),  # this process was born long after: the number was reused
        (socket.gethostname(), 2**22 + 1, START, "died"),  # beyond the kernel's largest process number
        ("another-host", 1, START, "not ended"),
        (None, None, START, "died"),
    ],
    ids=["running", "reused", "beyond", "elsewhere", "unknown"],  # the same in every process that collects them
)
def test_an_attempt_without_an_end(
    tmp_path: Path, host: str | None, pid: int | None, started: float, outcome: str
) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    write_attempt(tmp_path, 1, host=host, pid=pid, started=started)
    assert open_run(tmp_path).outcome == outcome


def test_a_sentence_on_what_went_wrong_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    write_attempt(tmp_path, 1, started=START, ended=START + 5, outcome="crashed: ValueError: no", exit_code=1)
    run = open_run(tmp_path)
    assert run.state == "failed" and run.outcome == "crashed: ValueError: no"


def test_an_earlier_attempt_without_an_end_has_died(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    for number in (1, 2, 10):
        write_attempt(tmp_path, number, host=socket.gethostname(), pid=os.getpid(), started=time.time() + 60)
    assert [(a.number, a.outcome) for a in open_run(tmp_path).attempts] == [(1, "died"), (2, "died"), (10, "running")]


def test_times_may_be_iso_texts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    write_attempt(tmp_path, 1, started="2026-03-14T12:00:00+00:00", ended="2026-03-14T12:01:00Z", outcome="finished")
    assert open_run(tmp_path).attempts[0].seconds == 60


def test_broken_files_are_unknown_not_errors(make_run: MakeRun) -> None:
    path = make_run()
    for name in ("run.json", "config.yaml", "attempts/001/attempt.json", "checkpoints/step-00000040/manifest.json"):
        (path / name).write_bytes(b'{"a": [\xff')
    run = open_run(path)
    assert run.facts == {} and run.config == {} and run.total_steps is None and run.tokens_per_step is None
    assert [attempt.outcome for attempt in run.attempts] == ["died", "finished"]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [100]
    assert summarize(run).tokens is None


def test_fields_of_the_wrong_kind_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: 5\ndata: {store: [1]}\n")
    (tmp_path / "run.json").write_text("[1]")
    write_attempt(tmp_path, 1, host=5, pid="x", started="soon", ended=[], outcome={}, exit_code="1")
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / "manifest.json").write_text(
        json.dumps({"step": 1, "files": [1], "context": 3})
    )
    run = open_run(tmp_path)
    assert run.attempts[0].outcome == "died" and run.attempts[0].seconds is None
    assert run.checkpoints[0].bytes is None and run.data_manifest == {} and run.vocab_size is None
    assert summarize(run).step == 0


def test_the_store_is_found_from_where_the_run_was_started(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert open_run(path).data_manifest["splits"]["train"]["python"]["documents"] == 95


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run directory"):
        open_run(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_run(tmp_path / "nothing")


def test_the_name_of_a_run_leads_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: mine\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        open_run(Path("mine"))
    assert refused.value.fix == f"did you mean {Path('runs', 'mine')}?"


def test_ages_in_words() -> None:
    assert [ago_text(1000.0 - age, now=1000.0) for age in (5, 120, 7200, 200_000)] == [
        "just now",
        "2 min ago",
        "2 h ago",
        "2 d ago",
    ]

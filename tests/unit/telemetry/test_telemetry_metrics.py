"""metrics.jsonl: what is written is what is read, through kills and resumes."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import CheckpointError
from headway.core.files import timeout_writer
from headway.telemetry.metrics import MetricsLog, read_metrics
from support.waits import LONG
from support.work import count_calls


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_record_has_step_attempt_time_and_every_bit_of_its_values(tmp_path: Path) -> None:
    value, before = 0.1 + 0.2, time.time()
    with MetricsLog(tmp_path / "run" / "metrics.jsonl", attempt=3) as log:
        log.write(1, {"train/loss": value})
    (record,) = lines(tmp_path / "run")
    assert record["step"] == 1 and record["attempt"] == 3
    assert before - 1 <= record["time"] <= time.time() + 1
    steps, values = read_metrics(tmp_path / "run").series("train/loss")
    assert steps.tolist() == [1] and values.tolist() == [value]


def test_nan_and_infinities_are_valid_json_and_come_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        for step, value in enumerate((math.nan, math.inf, -math.inf, 2.0), start=1):
            log.write(step, {"train/loss": value})
    assert [record["train/loss"] for record in lines(tmp_path)] == ["NaN", "Infinity", "-Infinity", 2.0]
    metrics = read_metrics(tmp_path)
    _, values = metrics.series("train/loss")
    assert math.isnan(values[0]) and values[1:].tolist() == [math.inf, -math.inf, 2.0]
    steps, finite = metrics.finite("train/loss")
    assert steps.tolist() == [4] and finite.tolist() == [2.0]


def test_an_evaluation_adds_to_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        log.write(1, {"train/loss": 5.0})
        log.write(1, {"evaluation/loss": 6.0})
        log.write(2, {"train/loss": 4.0})
    metrics = read_metrics(tmp_path)
    assert metrics.series("train/loss")[0].tolist() == [1, 2]
    assert metrics.series("evaluation/loss")[0].tolist() == [1]
    assert metrics.repeated_steps == 0


def write_attempt(path: Path, attempt: int, steps: range, value: float) -> None:
    with MetricsLog(path / "metrics.jsonl", attempt) as log:
        for step in steps:
            log.write(step, {"train/loss": value})


def test_a_resumed_attempt_supersedes_what_the_dead_one_did_after_the_checkpoint(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 11), 1.0)
    write_attempt(tmp_path, 2, range(6, 8), 2.0)  # from the checkpoint of step 5, killed again after step 7
    metrics = read_metrics(tmp_path)
    steps, values = metrics.series("train/loss")
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert values.tolist() == [1.0] * 5 + [2.0] * 2
    assert metrics.last_step == 7
    assert metrics.repeated_steps == 5
    assert (metrics.spans[1].first_step, metrics.spans[1].last_step) == (1, 10)
    assert (metrics.spans[2].first_step, metrics.spans[2].last_step) == (6, 7)


def test_values_that_only_the_dead_attempt_had_are_superseded_too(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 9), 1.0)
    with MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        log.write(8, {"evaluation/loss": 3.0})
    write_attempt(tmp_path, 2, range(5, 7), 2.0)
    assert read_metrics(tmp_path).series("evaluation/loss")[0].tolist() == []


def test_a_step_that_is_left_out_has_nothing_of_when_it_was_computed(tmp_path: Path) -> None:
    """Whether the checkpoint that a rollback goes to is right before the trouble, or steps before it."""
    for first in (3, 1):
        run = tmp_path / str(first)
        with MetricsLog(run / "metrics.jsonl", 1) as log:
            for step in (1, 2, 3, *range(first, 3)):
                log.write(step, {"train/loss": float(step)})
            log.write(3, {"train/left_out_steps": 1.0, "data/share/a": 0.5})
            log.write(3, {"checkpoint/uploaded_step": 2.0})
            log.write(4, {"train/loss": 4.0})
        metrics = read_metrics(run)
        left_out = metrics.series("train/left_out_steps")
        assert metrics.series("train/loss")[0].tolist() == [1, 2, 4]
        assert left_out[0].tolist() == [3] and metrics.series("checkpoint/uploaded_step")[0].tolist() == [3]


def test_what_came_after_a_step_takes_nothing_from_it(tmp_path: Path) -> None:
    """An outcome told right after a rollback, or an evaluation that the attempt before had no time for."""
    write_attempt(tmp_path, 1, range(1, 16), 1.0)
    with MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        log.write(10, {"checkpoint/uploaded_step": 10.0, "checkpoint/upload_seconds": 1.0})
    with MetricsLog(tmp_path / "metrics.jsonl", 2) as log:
        log.write(10, {"evaluation/loss": 2.0, "evaluation/perplexity": 7.0})
        log.write(10, {"checkpoint/saved_step": 10.0})
    metrics = read_metrics(tmp_path)
    assert metrics.series("train/loss")[0].tolist() == list(range(1, 11)) and metrics.repeated_steps == 5
    assert metrics.series("evaluation/loss")[0].tolist() == [10]
    assert metrics.series("attempt")[1].tolist() == [1.0] * 10
    assert (metrics.spans[2].first_step, metrics.spans[2].last_step) == (11, 10), "it has done none yet"
    write_attempt(tmp_path, 2, range(11, 13), 2.0)
    metrics = read_metrics(tmp_path)
    assert metrics.series("train/loss")[1].tolist() == [1.0] * 10 + [2.0] * 2
    assert (metrics.spans[1].first_step, metrics.spans[2].first_step, metrics.repeated_steps) == (1, 11, 5)


def test_a_third_attempt_may_go_back_further(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 11), 1.0)
    write_attempt(tmp_path, 2, range(9, 13), 2.0)
    write_attempt(tmp_path, 3, range(3, 5), 3.0)  # the newer checkpoints did not verify
    steps, values = read_metrics(tmp_path).series("train/loss")
    assert steps.tolist() == [1, 2, 3, 4] and values.tolist() == [1.0, 1.0, 3.0, 3.0]


def test_an_attempt_that_goes_on_exactly_at_the_end_repeats_nothing(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 4), 1.0)
    write_attempt(tmp_path, 2, range(4, 6), 2.0)
    metrics = read_metrics(tmp_path)
    assert metrics.repeated_steps == 0 and metrics.series("train/loss")[0].tolist() == [1, 2, 3, 4, 5]


def test_a_line_cut_by_a_kill_harms_no_other_record(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 4), 1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    write_attempt(tmp_path, 2, range(3, 5), 2.0)
    steps, values = read_metrics(tmp_path).series("train/loss")
    assert steps.tolist() == [1, 2, 3, 4] and values.tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from headway.core.files import timeout_writer\n"
        "from headway.telemetry.metrics import MetricsLog\n"
        "timeout_writer._SECONDS = 60\n"  # a busy disk is not to be taken for one that hangs
        "log = MetricsLog(Path(sys.argv[1]), 1)\n"
        "for step in range(1, 101): log.write(step, {'train/loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "metrics.jsonl")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path).last_step == 100


def test_records_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    odd = [
        '{"step": "x"}',
        '{"step": 1, "attempt": -1}',
        "[1]",
        '{"step": -1}',
        "",
        '{"step": true}',
        '{"step": 2, "attempt": "a"}',
    ]
    odd.append('{"step": 1, "attempt": 1, "a": null, "b": "text", "c": true, "d": [1], "e": 1}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(odd))
    assert read_metrics(tmp_path).names == ["attempt", "e"]


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path)
    assert metrics.names == [] and metrics.last_step == 0 and metrics.last("train/loss") is None
    assert read_metrics(tmp_path, newest=True).names == []


def test_the_newest_records_of_a_long_history_are_read_alone(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, range(1, 20_001), 1.0)
    metrics = read_metrics(tmp_path, newest=True)
    steps, _ = metrics.series("train/loss")
    assert metrics.last_step == 20_000
    assert 100 < len(steps) < 10_000 and steps.tolist() == list(range(steps[0], 20_001))


def test_records_wait_in_memory_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeout_writer, "_SECONDS", 60.0)
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path, 1) as log:
        log.write(1, {"train/loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))  # it ends in mid-line
        try:
            log.write(2, {"train/loss": 2.0})
            log.write(3, {"train/loss": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.write(4, {"train/loss": 4.0})
    said = capsys.readouterr().err
    assert said.count("kept in memory") == 1 and "metrics are written again" in said
    steps, losses = read_metrics(tmp_path).series("train/loss")
    assert (steps.tolist(), losses.tolist()) == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])


def test_a_record_that_is_begun_is_there_when_that_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timeout_writer, "_SECONDS", 60.0)
    goes, may = threading.Event(), [True]

    def may_write() -> None:
        goes.wait(LONG)
        if not may[0]:
            raise CheckpointError("another attempt has the run")

    log = MetricsLog(tmp_path / "metrics.jsonl", 1, may_write)
    log.begin(1, {"train/loss": 1.0})
    assert not (tmp_path / "metrics.jsonl").read_bytes(), "it is not waited for"
    goes.set()
    log.settle()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    may[0] = False
    log.begin(2, {"train/loss": 2.0})
    with pytest.raises(CheckpointError, match="another attempt has the run"):
        log.settle()
    with pytest.raises(CheckpointError, match="another attempt has the run"):
        log.begin(3, {"train/loss": 3.0})
    log.close()
    assert [line["step"] for line in lines(tmp_path)] == [1] and not capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_records_that_never_find_a_place_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("ab", buffering=0) as full, MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        log._file.close()
        log._file = full
        log.write(1, {"train/loss": 1.0})
    assert f"1 record is missing in {tmp_path}/metrics.jsonl: No space left" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="metrics cannot be written"):
        MetricsLog(tmp_path / "file" / "metrics.jsonl", 1)


def test_writing_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call for a record, none that waits for the disk, and as little in Python after many as at first."""
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it waits for the disk"))
    values, written = {f"name/{index}": index / 7 for index in range(12)}, list[int]()
    with MetricsLog(tmp_path / "metrics.jsonl", 1) as log:
        file = log._file
        log._file = SimpleNamespace(
            write=lambda line: written.append(file.write(line)) or written[-1], close=file.close
        )
        calls = [count_calls(lambda s=step: log.write(s + 1, values)) for step in range(1000)]
    assert len(written) == 1000 and (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1000
    assert max(calls) < 100

"""A disk that takes no more ends whatever writes there by three lines and the right exit code, and by no traceback."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headway
from headway.checkpoint.format.file_layout import Piece, plan_files
from headway.checkpoint.save.staging import StagingBuffer
from headway.checkpoint.store import CheckpointStore
from headway.config import resolve
from headway.core.errors import CheckpointError, DataError
from headway.core.types import Block
from headway.run.session.attempt import RunOptions
from headway.run.supervisor import attempt_process
from headway.run.supervisor.error_report import ErrorReport, most_telling_report
from headway.run.supervisor.worker import reasons_in
from headway.text.preparing import workers
from headway.text.preparing.prepare import prepare
from support.runs import config_values, headway_in_copy, in_child, refuse_to_open, store_contents, write_corpus

#: A word of what is to be done.
ADVICE = {errno.ENOSPC: "make room", errno.EDQUOT: "quota", errno.EFBIG: "ulimit -f", errno.EROFS: "mount it"}
numbers = pytest.mark.parametrize("number", ADVICE, ids=errno.errorcode.__getitem__)


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/disk/run.json")


@numbers
def test_a_worker_leaves_it_as_its_reason(number: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end, reasons_in(tmp_path, 1):
        raise error(number)
    left = most_telling_report(tmp_path)
    assert end.value.code == 4 and left is not None
    assert (left.exit_code, left.where) == (4, "/disk/run.json") and os.strerror(number) in left.what


@numbers
def test_the_first_process_of_an_attempt_tells_its_supervisor(
    number: int, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise error(number)

    told: list[ErrorReport] = []
    channel = SimpleNamespace(send=told.append)
    monkeypatch.setattr("headway.run.supervisor.attempt_training.run_first", refuse)
    assert attempt_process.run_attempt(channel, resolve(headway.load_config(tiny())), RunOptions()) == 4  # type: ignore[arg-type]
    (said,) = told
    assert (said.exit_code, said.where) == (4, "/disk/run.json")
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_that_fails_before_the_first_step_is_a_line(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the exit code of a disk that takes no more: another attempt may read it."""

    def failing(path: Path) -> OSError | None:
        return OSError(errno.EIO, os.strerror(errno.EIO), str(path)) if path.name == "tokenizer.json" else None

    refuse_to_open(monkeypatch, failing)
    code, printed = headway_in_copy("train", tiny())
    assert code == 1 and "Traceback" not in printed, printed
    assert "error: the disk has failed (Input/output error)" in printed and "tokenizer.json" in printed


@numbers
def test_a_training_in_somebody_elses_process_raises_it_and_records_it(number: int, tmp_path: Path) -> None:
    class Writes(headway.Callback):
        def on_step(self, job: Any, step: int, metrics: dict[str, float]) -> None:
            raise error(number)

    values = config_values(tmp_path, train={"steps": 2, "global_batch": 4})
    values = {key: value for key, value in values.items() if key not in ("data", "model")}
    trainer = headway.Trainer(
        torch.nn.Linear(1, 1),
        [torch.tensor([float(x)]) for x in range(4)],
        lambda model, batch: model(batch).square().mean(),
        headway.Config.model_validate(values),
        callbacks=[Writes()],
    )
    with pytest.raises(CheckpointError) as raised:
        trainer.fit()
    assert raised.value.where == "/disk/run.json" and os.strerror(number) in raised.value.what
    attempt = tmp_path / "runs/tiny/attempts/001"
    record = json.loads((attempt / "attempt.json").read_text())
    assert (record["outcome"], record["exit_code"]) == (raised.value.what, 4)
    assert not (attempt / "traceback.txt").exists()


@numbers
def test_a_checkpoint_says_what_to_do(number: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    refused = store._cannot_write(2, 100, error(number))
    assert os.strerror(number) in refused.what and ADVICE[number] in str(refused.fix)


#: Bytes that a file may have: less and less of what a training writes goes.
SIZES = (10, 700, 2_500, 6_000, 20_000, 60_000, 200_000, 2_000_000)

#: Trains under each limit, in copies of a process that has loaded everything; tells exit codes and what was said.
_LIMITED = """
import json, os, resource, sys
from headway.cli import application, main
from headway.cli.start import train
from headway.run.session import session
from headway.training import task

def end_of(size, words):
    read, write = os.pipe()  # a file would be limited too
    if (pid := os.fork()) == 0:
        try:
            sys.stderr = os.fdopen(write, "w", buffering=1)
            sys.argv = ["headway", "train", *words, f"name=limit-{size}", "supervise.enabled=false"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            code = main._run()
        except BaseException as error:
            print("Traceback", error, file=sys.stderr)
            code = 9
        sys.stderr.flush()
        os._exit(code or 0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text

sizes, *words = sys.argv[1:]
print(json.dumps([end_of(size, words) for size in json.loads(sizes)]))
"""


@pytest.mark.slow
def test_a_limit_at_every_size_of_file_that_a_training_writes(tiny: Callable[..., Path]) -> None:
    config = tiny(train={"steps": 2}, checkpoint={"every": "1 steps"})
    command = [sys.executable, "-c", _LIMITED, json.dumps(SIZES), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    for code, text in ends:
        assert "Traceback" not in text, text
        assert (code == 4) == ("error: " in text and "File too large" in text), text
    codes = [code for code, _ in ends]
    assert (codes[0], codes[-1]) == (4, 0) and set(codes) == {0, 4}
    assert codes == sorted(codes, reverse=True), "a larger limit is no worse"


def test_a_state_that_is_larger_than_files_may_be_is_not_copied_in_memory_either() -> None:
    def limited() -> None:
        block = Block.whole(torch.zeros(10_000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(CheckpointError, match="a file would be larger than is allowed") as refused:
            StagingBuffer().prepare(plan_files([Piece.of("weight", block)], 0, 2**20), pinned=False)
        assert "in memory, to be saved" in str(refused.value.where) and "ulimit -f" in str(refused.value.fix)

    assert in_child(limited) == 0


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOENT], ids=errno.errorcode.__getitem__)
def test_text_is_prepared_without_memory_that_processes_share(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Locks between processes lie in /dev/shm, which may be read-only, full or missing."""
    write_corpus(tmp_path)

    def store(name: str) -> dict[str, bytes]:
        values = config_values(tmp_path)
        data = {
            **values["data"],
            "store": str(tmp_path / name),
            "workers": 2,
            "clean": [{"step": "length", "min_words": 3}],
        }
        prepare(headway.Config.model_validate({**values, "data": data}).data, workers=2)
        return store_contents(tmp_path / name)

    expected = store("before")

    def no_locks(*_: object, **__: object) -> ProcessPoolExecutor:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(workers, "ProcessPoolExecutor", no_locks)
    assert store("after") == expected
    assert f"/dev/shm: {os.strerror(number)}" in capfd.readouterr().err


@numbers
def test_a_store_that_cannot_be_written_says_what_to_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    monkeypatch.setenv("HEADWAY_FAULTS", f"{errno.errorcode[number].lower()}@data.shard:1")
    monkeypatch.setattr("headway.core.process.faults._passed", Counter())
    config = headway.Config.model_validate(config_values(tmp_path))
    with pytest.raises(DataError, match=os.strerror(number)) as refused:
        prepare(config.data)
    assert {**ADVICE, errno.ENOSPC: "free space"}[number] in str(refused.value.fix)
    assert not (tmp_path / "store").exists()

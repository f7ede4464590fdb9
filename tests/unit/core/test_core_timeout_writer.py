"""Whoever writes to a disk that hangs goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.core import console
from headway.core.errors import CheckpointError
from headway.core.files import timeout_writer
from headway.core.files.timeout_writer import TimeoutLog, TimeoutWriter
from headway.core.process.waiting import wait_until
from headway.telemetry import metrics as metrics_module
from headway.telemetry.metrics import MetricsLog, read_metrics
from support.waits import LONG


class Hanging:
    """A file whose disk answers when it is let."""

    def __init__(self) -> None:
        self.content, self.closed = b"", False
        self.asked, self.goes = threading.Event(), threading.Event()

    def write(self, content: bytes) -> int:
        self.asked.set()
        self.goes.wait(LONG)
        self.content += content
        return len(content)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def disk() -> Iterator[Any]:
    disk = Hanging()
    yield disk
    disk.goes.set()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long a write is waited for: short while one hangs on purpose, long where none is to be taken for one."""
    return lambda seconds: monkeypatch.setattr(timeout_writer, "_SECONDS", seconds)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headway-timeout-writer"}


def test_what_hangs_is_waited_for_once(hurried: Callable[[float], None]) -> None:
    hurried(0.05)
    goes, calls, patiently = threading.Event(), [], TimeoutWriter()

    def act() -> None:
        calls.append(1)
        goes.wait(LONG)

    assert not patiently(act) and patiently.late_seconds >= 0.05
    hurried(1e6)  # from here on who waits does so without end
    assert not any(patiently(act) for _ in range(100))
    goes.set()
    assert wait_until(lambda: not patiently.late_seconds, LONG)
    assert patiently(act) and len(calls) == 102, "all has its turn"
    assert patiently.end(lambda: None)
    assert not patiently(act), "nobody is there any more to wait for"


def test_what_is_begun_is_not_waited_for_but_what_was_begun_before(hurried: Callable[[float], None]) -> None:
    hurried(10)
    goes, done, patiently = threading.Event(), [], TimeoutWriter()
    assert patiently.begin(lambda: goes.wait(LONG) and done.append(1)) and not done
    threading.Timer(0.2, goes.set).start()
    assert patiently.begin(lambda: done.append(2)) and done[0] == 1, "this one has been waited for"
    assert patiently(lambda: done.append(3)) and done == [1, 2, 3]
    assert patiently.end(lambda: None) and patiently.begin(lambda: done.append(4)) and len(done) == 3


def test_what_is_begun_behind_what_hangs_is_waited_for_once(hurried: Callable[[float], None]) -> None:
    hurried(0.05)
    goes, calls, patiently = threading.Event(), [], TimeoutWriter()

    def act() -> None:
        calls.append(1)
        goes.wait(LONG)

    assert patiently.begin(act) and not patiently.begin(act)
    hurried(1e6)
    assert not any(patiently.begin(act) for _ in range(99))
    assert patiently.late_seconds
    goes.set()
    assert patiently.end(lambda: None) and len(calls) == 101


def test_an_error_of_the_disk_is_passed_over() -> None:
    def fail() -> None:
        raise OSError("broken")

    patiently = TimeoutWriter()
    assert patiently(fail) and patiently(lambda: None) and patiently.end(fail)


def test_a_copy_of_the_process_has_a_thread_of_its_own(hurried: Callable[[float], None]) -> None:
    hurried(10)
    goes, patiently = threading.Event(), TimeoutWriter()
    assert patiently(lambda: None) and patiently.begin(lambda: goes.wait(LONG))
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            code = 0 if patiently.begin(lambda: None) and patiently(lambda: None) else 2
        finally:
            os._exit(code)
    assert os.waitpid(copy, 0)[1] == 0
    goes.set()
    assert patiently(lambda: None) and patiently.end(lambda: None)


def test_lines_wait_for_the_disk(disk: Hanging, hurried: Callable[[float], None]) -> None:
    """A line that comes while another one is being written needs no third one to be written too."""
    hurried(0.05)
    file: Any = disk
    log = TimeoutLog(file)
    log.write(b"a")
    log.write(b"b")
    disk.goes.set()
    assert wait_until(lambda: disk.content == b"ab", LONG)
    log.close()


def test_the_last_lines_of_a_log_are_waited_for(
    tmp_path: Path, disk: Hanging, hurried: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say why the run ended."""
    hurried(0.05)
    monkeypatch.setattr(Path, "open", lambda *_, **__: disk)
    before = threads()
    with console.log_to(tmp_path / "log", tolerate_hangs=True):
        console.write_log("one")
        console.write_log("two")
        threading.Timer(0.3, disk.goes.set).start()
    assert disk.content == b"one\ntwo\n" and disk.closed
    assert wait_until(lambda: threads() <= before, LONG), "nobody trains with the threads of an earlier run"


def hanging_metrics(path: Path, disk: Hanging, monkeypatch: pytest.MonkeyPatch) -> MetricsLog:
    metrics = MetricsLog(path, 1)
    monkeypatch.setattr(metrics, "_file", disk)
    return metrics


def test_records_wait_for_the_disk(
    tmp_path: Path,
    disk: Hanging,
    hurried: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hurried(0.05)
    metrics = hanging_metrics(tmp_path / "metrics.jsonl", disk, monkeypatch)
    for step in (1, 2):
        metrics.write(step, {"train/loss": float(step)})
    assert not capsys.readouterr().err, "a disk that a checkpoint is written to may take a while"
    monkeypatch.setattr(metrics_module, "_SILENT_SECONDS", 0.05)
    metrics.write(3, {"train/loss": 3.0})
    metrics.write(4, {"train/loss": 4.0})
    assert capsys.readouterr().err.count("the disk does not answer") == 1
    hurried(10)
    disk.goes.set()
    assert wait_until(lambda: not metrics._writer.late_seconds, LONG)
    metrics.write(5, {"train/loss": 5.0})
    assert "are written again" in capsys.readouterr().err
    metrics.close()
    (tmp_path / "metrics.jsonl").write_bytes(disk.content)
    assert read_metrics(tmp_path).series("train/loss")[0].tolist() == [1, 2, 3, 4, 5]


def test_the_last_records_are_waited_for(
    tmp_path: Path,
    disk: Hanging,
    hurried: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A disk that is only slow loses none."""
    hurried(0.05)
    before = threads()
    metrics = hanging_metrics(tmp_path / "metrics.jsonl", disk, monkeypatch)
    for step in (1, 2):
        metrics.write(step, {"train/loss": float(step)})
    threading.Timer(0.3, disk.goes.set).start()
    metrics.close()
    metrics.close()
    assert disk.content.count(b"\n") == 2 and disk.closed and not capsys.readouterr().err
    assert wait_until(lambda: threads() <= before, LONG)


def test_a_disk_that_hangs_to_the_end_is_given_up(
    tmp_path: Path,
    disk: Hanging,
    hurried: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hurried(0.05)
    monkeypatch.setattr(timeout_writer, "_END_SECONDS", 0.05)
    metrics = hanging_metrics(tmp_path / "metrics.jsonl", disk, monkeypatch)
    for step in (1, 2):
        metrics.write(step, {"train/loss": float(step)})
    metrics.close()
    metrics.close()
    said = capsys.readouterr().err
    assert said == f"warning: 2 records are missing in {tmp_path}/metrics.jsonl: the disk does not answer\n"
    disk.goes.set()
    assert wait_until(lambda: disk.closed, LONG) and disk.content.count(b"\n") == 2, "what it still takes, it gets"


def test_whose_the_run_is_may_take_long_to_read(
    tmp_path: Path,
    hurried: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer comes with a later record, and what has waited for it is not recorded."""
    hurried(0.05)
    goes, path = threading.Event(), tmp_path / "metrics.jsonl"

    def ask() -> None:
        goes.wait(LONG)
        raise CheckpointError("it is another one's")

    monkeypatch.setattr(metrics_module, "_SILENT_SECONDS", 0.05)
    metrics = MetricsLog(path, 1, ask)
    metrics.write(1, {"train/loss": 1.0})
    assert "the disk does not answer" in capsys.readouterr().err
    hurried(10)
    goes.set()
    assert wait_until(lambda: not metrics._writer.late_seconds, LONG)
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="another one's"):
            metrics.write(step, {"train/loss": 2.0})
    metrics.close()
    assert not path.read_bytes() and not capsys.readouterr().err

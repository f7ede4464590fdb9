"""Whoever writes to a disk that hangs goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headway.core import patience
from headway.core.patience import PatientLog, Patiently
from headway.core.waiting import wait_until
from headway.telemetry.metrics import MetricsLog, read_metrics


def test_what_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_SECONDS", 0.05)
    goes, calls = threading.Event(), []

    def act() -> None:
        calls.append(1)
        goes.wait()

    patiently = Patiently(act)
    assert patiently.idle and not patiently() and not patiently.idle
    began = time.monotonic()
    assert not any(patiently() for _ in range(100)) and time.monotonic() - began < 2
    goes.set()
    assert wait_until(lambda: patiently.idle, 10) and patiently() and len(calls) == 2


class Hanging:
    """A file whose disk answers when it is let."""

    def __init__(self) -> None:
        self.content = b""
        self.goes = threading.Event()

    def write(self, content: bytes) -> int:
        self.goes.wait()
        self.content += content
        return len(content)


def test_lines_and_records_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "_SECONDS", 0.05)
    file: Any = Hanging()
    log = PatientLog(file)
    log.write(b"a")
    log.write(b"b")
    file.goes.set()
    assert wait_until(lambda: file.content == b"ab", 10)

    metrics, disk = MetricsLog(tmp_path / "metrics.jsonl", 1), Hanging()
    monkeypatch.setattr(metrics, "_file", disk)
    for step in (1, 2, 3):
        metrics.write(step, {"train/loss": float(step)})
    assert capsys.readouterr().err.count("the disk does not answer") == 1
    disk.goes.set()
    assert wait_until(lambda: metrics._write_waiting.idle, 10)
    metrics.write(4, {"train/loss": 4.0})
    assert "are written again" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_bytes(disk.content)
    assert read_metrics(tmp_path).series("train/loss")[0].tolist() == [1, 2, 3, 4]

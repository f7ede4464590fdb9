"""A command that is told what goes wrong, and that nobody waits for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from headway.core import console
from headway.core.alerts import alerting


def test_warnings_are_told_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "told.jsonl"
    with alerting(f"cat >> '{file}'", "mine"):
        console.warning("the disk is full")
        console.notice("all is well")
    console.warning("of another time")
    (told,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (told["run"], told["what"]) == ("mine", "the disk is full") and told["time"] == pytest.approx(
        time.time(), abs=60
    )


def test_a_command_that_fails_or_hangs_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.core.alerts._END_SECONDS", 0.2)
    start = time.monotonic()
    with console.log_to(tmp_path / "log"):
        with alerting("exit 3", "mine"):
            console.warning("x" * 200_000)
            time.sleep(0.3)
            console.warning("again")
        with alerting("sleep 20", "mine"):
            for number in range(9):
                console.warning(f"number {number}")
        with alerting(None, "mine"):
            console.warning("nobody is told")
    assert time.monotonic() - start < 10
    log = (tmp_path / "log").read_text()
    assert "telemetry.alert ended with exit code 3" in log and "which is busy: number 8" in log

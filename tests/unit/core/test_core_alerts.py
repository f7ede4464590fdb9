"""A command that is told what goes wrong, and that nobody waits for."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from headway.core import console
from headway.core.alerts import alerting
from headway.core.process.waiting import wait_until
from support.waits import LONG


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command is started in however long that takes."""
    monkeypatch.setattr("headway.core.alerts._END_SECONDS", 60.0)


def test_warnings_are_told_and_nothing_else(tmp_path: Path) -> None:
    file, before = tmp_path / "told.jsonl", time.time()
    with alerting(f"cat >> '{file}'", tmp_path / "mine"):
        console.warning("the disk is full")
        console.notice("all is well")
    console.warning("of another time")
    (told,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (told["run"], told["what"]) == ("mine", "the disk is full")
    assert before - 1 <= told["time"] <= time.time() + 1


def test_its_file_can_be_opened_before_the_disk_hangs(tmp_path: Path) -> None:
    """And is the one in the folder of today: `--restart` moves the old one away."""
    run, old = tmp_path / "run", tmp_path / "old"
    run.mkdir()
    with alerting("echo so >&2", run) as alerts:
        assert alerts is not None
        run.rename(old)
        run.mkdir()
        alerts.open_file()
        assert (run / "alerts.log").exists(), "before there is anything to tell"
        console.warning("the disk hangs")
    assert (run / "alerts.log").read_text() == "so\n" and (old / "alerts.log").read_text() == ""


def test_what_it_says_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`curl -v` tells every header; and what a variable holds that the command names is nobody's business."""
    monkeypatch.setenv("PAGER_WORD", "plain1text")
    monkeypatch.setenv("PAGER_TOKEN", "other1text")
    file = tmp_path / "told"
    said = "$PAGER_WORD ${PAGER_WORD} other1text $HOME, Authorization: Bearer abc"
    command = f"cat > '{file}'; echo \"{said}\" >&2"
    with alerting(command, tmp_path):
        console.warning("403 for https://me:abc@example.org with other1text")
    home = str(Path.home())
    assert (tmp_path / "alerts.log").read_text() == f"*** *** *** {home}, Authorization: ***\n"
    assert json.loads(file.read_text())["what"] == "403 for https://***@example.org with ***"


def test_what_a_command_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    release = tmp_path / "release"
    with alerting(
        f"(while [ ! -e '{release}' ]; do sleep 0.05; done; touch '{tmp_path}/done') & echo so >&2", tmp_path
    ):
        console.warning("x")
    assert (tmp_path / "alerts.log").read_text() == "so\n" and not (tmp_path / "done").exists()
    release.touch()
    assert wait_until((tmp_path / "done").exists, 60), "it goes on"


def test_a_command_that_fails_or_hangs_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with console.log_to(tmp_path / "log"):
        with alerting("echo so >&2; exit 3", tmp_path):
            console.warning("x" * 200_000)
            assert wait_until(lambda: "exit code 3" in (tmp_path / "alerts.log").read_text(), LONG)
            console.warning("again")
        monkeypatch.setattr("headway.core.alerts._END_SECONDS", 0.2)
        with alerting(f"sleep 600; touch '{tmp_path}/left'", tmp_path / "gone"):
            for number in range(9):
                console.warning(f"number {number}")
        with alerting(None, tmp_path):
            console.warning("nobody is told")
    assert "telemetry.alert is busy; no alert was sent for: number 8" in (tmp_path / "log").read_text()
    assert (tmp_path / "alerts.log").read_text() == "so\ntelemetry.alert ended with exit code 3\n" * 2

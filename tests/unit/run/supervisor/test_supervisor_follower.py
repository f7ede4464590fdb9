"""The supervisor's side of the process that sends metrics to trackers: it is started again, spared, and given time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config import Config
from headway.core.process.table import all_processes, process_state
from headway.core.process.tree import end_all, members
from headway.core.process.waiting import wait_until
from headway.run.supervisor import follower_process
from headway.run.supervisor.follower_process import FollowerProcess

#: In the place of the follower: it says hello, waits until its input ends, and says that it is done.
SAYS_HELLO = """print('{"kind": "follower_said", "text": "hello"}', flush=True)"""
SAYS_DONE = """print('{"kind": "follower_done"}')"""
POLITE = f"import sys; {SAYS_HELLO}; sys.stdin.read(); {SAYS_DONE}"
#: It hears nothing.
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FollowerProcess]:
    (tmp_path / "run").mkdir()
    behave(monkeypatch, POLITE)
    monkeypatch.setattr(follower_process, "_FIRST_DELAY", 0.05)
    config = Config.model_validate({"runs": str(tmp_path), "name": "run", "track": ["tensorboard"]})
    found = FollowerProcess(config)
    yield found
    for pid in found.pids:
        os.kill(pid, signal.SIGKILL)


def behave(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(follower_process, "module_command", lambda *words: [sys.executable, "-S", "-c", code])


def test_what_it_says_is_a_warning_and_it_ends_with_the_run(
    follower: FollowerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    follower.begin()
    (pid,) = follower.pids
    follower.begin()  # the next attempt
    assert follower.pids == (pid,)
    said: list[str] = []

    def heard() -> bool:
        follower.tend()
        said.append(capsys.readouterr().err)
        return "warning: hello" in "".join(said)

    assert wait_until(heard, 30)
    follower.finish(False, lambda: False)
    assert process_state(pid) is None and follower.pids == () and "not all" not in capsys.readouterr().err
    follower.tend()
    assert follower.pids == ()


def test_it_is_started_again_when_it_is_killed(follower: FollowerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    follower.begin()
    (first,) = follower.pids
    os.kill(first, signal.SIGKILL)

    def is_another() -> bool:
        follower.tend()
        return bool(follower.pids) and follower.pids != (first,)

    assert wait_until(is_another, 30)
    assert "died; it is started again" in capsys.readouterr().err
    follower.finish(False, lambda: False)


def test_one_that_does_not_end_is_killed_and_told(
    follower: FollowerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behave(monkeypatch, DEAF)
    for name, seconds in (("END_SECONDS", 0.2), ("_SILENT_SECONDS", 0.1), ("_GIVE_UP_SECONDS", 0.1)):
        monkeypatch.setattr(follower_process, name, seconds)
    follower.begin()
    (pid,) = follower.pids
    follower.finish(False, lambda: False)
    told = capsys.readouterr().err
    assert "waiting for trackers" in told and "`headway track" in told and "sends the rest" in told
    assert wait_until(lambda: process_state(pid) is None, 30)


def test_a_signal_ends_the_wait(follower: FollowerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, DEAF)
    monkeypatch.setattr(follower_process, "_GIVE_UP_SECONDS", 0.1)
    follower.begin()
    started = time.monotonic()
    follower.finish(True, lambda: True)
    assert time.monotonic() - started < 5


def test_the_end_of_an_attempt_spares_it_and_its_family() -> None:
    sleep = "import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', '{sleep}']); {sleep}"
    spared = subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-S", "-c", sleep], start_new_session=True)
    try:
        family = lambda: [p.pid for p in all_processes() if p.session == spared.pid]  # noqa: E731
        assert wait_until(lambda: len(family()) == 2, 30)
        found = {p.pid for p in members(all_processes(), [], os.getpid(), [spared.pid])}
        assert other.pid in found and not found & set(family())
        end_all([other.pid], None, spared=[spared.pid])
        assert other.poll() is not None or (other.wait(30) and len(family()) == 2)
    finally:
        os.killpg(spared.pid, signal.SIGKILL)
        spared.wait()
        if other.poll() is None:
            other.kill()
            other.wait()


def test_the_command_has_the_trackers_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    words: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        follower_process, "module_command", lambda *given: words.append(given) or [sys.executable, "-S", "-c", POLITE]
    )
    track = [{"mlflow": {"uri": "http://h:1"}}, "mine:Sink"]
    follower = FollowerProcess(Config.model_validate({"runs": str(tmp_path), "name": "run", "track": track}))
    follower.begin()
    follower.finish(False, lambda: False)
    module, run, trackers = words[0]
    assert (module, run) == ("headway.tracking.process", str(tmp_path / "run"))
    assert json.loads(trackers)[1] == {"own": {"sink": "mine:Sink", "options": {}}}
    without = FollowerProcess(Config.model_validate({"runs": str(tmp_path), "name": "run"}))
    without.begin()
    without.tend()
    without.finish(False, lambda: False)
    assert without.pids == () and len(words) == 1

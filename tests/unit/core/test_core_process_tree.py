"""No process of an attempt is left behind, and none of anybody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.core.process import table as process_table
from headway.core.process import tree
from headway.core.process.table import DEAD, STOPPED, ProcessState, process_state
from headway.core.process.tree import can_be_copied, end_all
from headway.core.process.waiting import wait_until
from support.waits import LONG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")

#: A worker whose child has one child in the session and one that has left it; all wait, and tell their numbers.
FAMILY = """
import os, subprocess, sys, time
wait = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", wait])
away = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
print(child.pid, away.pid, flush=True)
time.sleep(600)
"""


def test_a_whole_family_goes_and_a_stranger_stays() -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    worker = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        others = [int(word) for word in worker.stdout.readline().split()]
        os.kill(others[0], signal.SIGSTOP)
        while (state := process_state(others[0])) is not None and state.state != STOPPED:
            time.sleep(0.01)
        assert state is not None and (state.state, state.session, state.parent) == (STOPPED, worker.pid, worker.pid)
        assert end_all([worker.pid]) == []
        assert all(_gone(pid) for pid in [worker.pid, *others])
        assert stranger.poll() is None
    finally:
        for process in (stranger, worker):
            process.kill()
            process.wait()


def test_who_dies_after_its_parent_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the session, so that it was its parent's child, and nothing else."""
    worker, away = ProcessState(2**30, "S", 1, 2**30), ProcessState(2**30 + 1, "S", 2**30, 2**30 + 1)
    looks = [[worker, away], [replace(away, parent=1)], []]
    monkeypatch.setattr(tree, "all_processes", lambda: looks.pop(0))
    monkeypatch.setattr(tree, "arguments_of", lambda pid: ["sleep"])
    monkeypatch.setattr(tree, "finishes_its_work", lambda pid: False)
    assert end_all([worker.pid]) == [] and looks == []


def test_how_a_process_died_can_be_read() -> None:
    worker = subprocess.Popen(["sleep", "600"])
    worker.kill()
    while (state := process_state(worker.pid)) is not None and state.state != DEAD:
        time.sleep(0.01)
    assert state is not None and state.wait_status is not None
    assert os.waitstatus_to_exitcode(state.wait_status) == -signal.SIGKILL
    assert worker.wait() == -signal.SIGKILL
    assert process_state(worker.pid) is None


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that waits for no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_writer_may_finish_but_not_for_ever(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(process_table, "IDLE_SECONDS", 4.0)
    late, done, large = in_memory / "late", in_memory / "done", in_memory / "large"
    family = f"""
import subprocess, sys, time
name = "{process_table.FINISHES_ITS_WORK}"
quick = "import time, pathlib; time.sleep(0.5); pathlib.Path({str(done)!r}).touch()"
slow = "import time, pathlib; time.sleep(60); pathlib.Path({str(late)!r}).touch()"
work = "import time, pathlib\\nend = time.monotonic() + 7\\nwhile time.monotonic() < end: pass"
busy = work + "\\npathlib.Path({str(large)!r}).touch()"
for code in (quick, slow, busy):
    subprocess.Popen([sys.executable, "-c", code, name])
print("ready", flush=True)
time.sleep(600)
"""
    worker = subprocess.Popen([sys.executable, "-c", family], start_new_session=True, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    worker.stdout.readline()
    assert end_all([worker.pid], unfinished=lambda: not large.exists()) == []
    assert worker.wait() == -signal.SIGKILL
    assert done.exists() and not late.exists()
    assert large.exists(), "who gets on may finish, who sleeps may not"


def test_a_writer_that_has_saved_all_is_not_waited_for() -> None:
    """What it still sends to another tier, the next attempt sends."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", process_table.FINISHES_ITS_WORK]
    writer = subprocess.Popen(command, start_new_session=True)
    assert end_all([writer.pid], unfinished=lambda: False) == []
    assert writer.wait() == -signal.SIGKILL


#: A writer that has nothing to write, and ends when its worker has: its input ends.
IDLE_WRITER = 'import sys; print("ready", flush=True); sys.stdin.read()'


@pytest.fixture
def stopped_writer() -> Iterator[subprocess.Popen[bytes]]:
    """A stopped writer process with nothing to do, whose worker is gone."""
    command = [sys.executable, "-c", IDLE_WRITER, process_table.FINISHES_ITS_WORK]
    writer = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdin is not None and writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: (state := process_state(writer.pid)) is not None and state.state == STOPPED, LONG)
    writer.stdin.close()
    yield writer
    writer.kill()
    writer.wait()
    writer.stdout.close()


def test_a_stopped_writer_with_nothing_to_do_ends_by_itself(stopped_writer: subprocess.Popen[bytes]) -> None:
    """Otherwise it would be waited for as long as for one that may wait for its disk, and then killed."""
    assert end_all([stopped_writer.pid], unfinished=lambda: stopped_writer.poll() is None) == []
    assert stopped_writer.wait() == 0


def test_a_writer_that_has_just_begun_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no command line for a moment, in which the kernel makes room for its program."""
    arguments_of, looks = process_table.arguments_of, dict[int, int]()

    def late(pid: int) -> list[str]:
        looks[pid] = looks.get(pid, 0) + 1
        return arguments_of(pid) if looks[pid] > 4 else []

    monkeypatch.setattr(tree, "arguments_of", late)
    monkeypatch.setattr(process_table, "arguments_of", late)
    monkeypatch.setattr(tree, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(tree, "_BEGIN_SECONDS", 30.0)
    code = "import time; time.sleep(0.5)"
    writer = subprocess.Popen([sys.executable, "-c", code, process_table.FINISHES_ITS_WORK], start_new_session=True)
    assert end_all([writer.pid], unfinished=lambda: True) == []
    assert writer.wait() == 0 and looks[writer.pid] > 2


def test_a_machine_that_stood_still_makes_no_process_idle() -> None:
    """So long it was seen to do nothing, but only once."""
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        sleeper.send_signal(signal.SIGSTOP)  # it is still beginning, and computes for that
        assert wait_until(lambda: (state := process_state(sleeper.pid)) is not None and state.state == STOPPED, LONG)
        seen = dict[int, process_table.Seen]()
        assert process_table.gets_on(sleeper.pid, 0.0, seen)
        looks = [process_table.gets_on(sleeper.pid, 1e6 + number, seen) for number in range(100)]
        assert looks == [True] * 49 + [False] * 51
    finally:
        sleeper.kill()
        sleeper.wait()


def _gone(pid: int) -> bool:
    state = process_state(pid)
    return state is None or state.state == DEAD


class Gpus:
    """As `torch.cuda`: whoever counts GPUs spoils them for copies of the process."""

    def __init__(self, count: int) -> None:
        self.count, self.counted_in = count, 0

    def _is_compiled(self) -> bool:
        return True

    def device_count(self) -> int:
        self.counted_in = self.counted_in or os.getpid()
        return self.count

    def _is_in_bad_fork(self) -> bool:
        return self.counted_in not in (0, os.getpid())


@pytest.mark.parametrize("count, copied_after", [(2, False), (0, True)])
def test_a_process_that_has_counted_gpus_is_not_copied(
    count: int, copied_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(count)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=gpus))
    monkeypatch.setattr(tree, "has_one_thread", lambda: True)
    assert can_be_copied()
    gpus.device_count()
    assert can_be_copied() == copied_after
    monkeypatch.setattr(tree, "has_one_thread", lambda: False)
    assert not can_be_copied()

"""The processes of an attempt: how they are doing, and making sure that none is left.

Each worker leads a session of its own, so all that it starts carries its number, also what outlives it. A process that
leaves the session is still a descendant; one that does both and loses its parents is seen when the supervisor adopts
orphans (`adopt_orphans`).
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headway.core.alerts import LIMIT_SECONDS, is_alert

#: Part of the command line of a process that may finish what it writes when its worker is gone.
FINISHES_ITS_WORK = "headway.checkpoint.write_process"

#: How long it may take, and how long killed processes may take to go.
GRACE_SECONDS, GONE_SECONDS = 5.0, 30.0
#: How long a process may have no command line: the kernel gives it one some time after it has begun (execve(2)).
_BEGIN_SECONDS = 1.0
#: How long it may do nothing that can be seen while it is not finished: it may wait for the disk.
IDLE_SECONDS = 60.0
#: How often it must have been seen to do nothing.
_LOOKS = 50

STOPPED, TRACED, DEAD, UNINTERRUPTIBLE = "T", "t", "Z", "D"
_STATES = {
    "R": "runs",
    "S": "waits",
    UNINTERRUPTIBLE: "is in an uninterruptible call of the kernel",
    STOPPED: "was stopped by a signal (SIGSTOP) and has not been continued",
    TRACED: "is held by a debugger",
    DEAD: "has ended",
}
_LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class ProcessState:
    """A line of the process table."""

    pid: int
    state: str
    """As `ps` shows it: R, S, D (uninterruptible), T (stopped), t (traced), Z (dead, not yet waited for)."""
    parent: int
    session: int
    wait_status: int | None = None
    """Of a dead one, where it can be known."""


def process_state(pid: int) -> ProcessState | None:
    """The state of a process; None when there is none. Elsewhere than on Linux all that can be told is that it is."""
    if not _LINUX:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return ProcessState(pid, "S", -1, -1)
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold anything.
    fields = text[text.rindex(")") + 2 :].split()
    status = int(fields[49]) if fields[0] == DEAD and len(fields) > 49 else None
    return ProcessState(pid, fields[0], int(fields[1]), int(fields[3]), status)


def all_processes() -> list[ProcessState]:
    """Those that this process can see; none where there is no /proc."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()) if _LINUX else ()
    return [found for pid in pids if (found := process_state(pid)) is not None]


def children_of(pid: int) -> list[int]:
    """The numbers of a process's children that live, as far as they can be seen."""
    return [found.pid for found in all_processes() if found.parent == pid and found.state != DEAD]


def what_it_does(pid: int) -> str:
    """The state of a process in words, with the function of the kernel in which it waits where that may be read."""
    state = process_state(pid)
    if state is None:
        return "is gone"
    where = "0"
    with suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8", errors="replace").partition(".")[0] or where
    return _STATES.get(state.state, f"has state {state.state}") + (f" ({where})" if where != "0" else "")


def can_be_copied() -> bool:
    """Whether a copy of this process (`fork`) could train as well as another process."""
    return has_one_thread() and not _lacks_gpus_when_copied()


def has_one_thread() -> bool:
    """Whether there are no others, native ones too: they would be missing in a copy, with locks in hand."""
    return _LINUX and len(list(Path("/proc/self/task").iterdir())) == 1


def _lacks_gpus_when_copied() -> bool:
    """Whether CUDA is spoilt for copies of this process, which refuse to use it once this one has as much as asked
    whether there are GPUs (`torch.cuda.is_available`). Only a copy knows, so one is made and asked."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._is_compiled():
        return False
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            code = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(code)  # the frames above belong to the process that was copied
    _, status = os.waitpid(copy, 0)
    return status != 0 and torch.cuda.device_count() > 0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents die (Linux). For a process that has no other children."""
    if _LINUX:
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def members(
    processes: Iterable[ProcessState], leaders: Collection[int], descendants_of: int | None = None
) -> list[ProcessState]:
    """The processes of some sessions, with all their descendants, and those of one process if it is given."""
    processes = [p for p in processes if p.state != DEAD]
    found = {p.pid for p in processes if p.session in leaders or p.pid in leaders}
    parents = {*found, *([descendants_of] if descendants_of is not None else [])}
    while True:
        more = {p.pid for p in processes if p.parent in parents} - found
        if not more:
            break
        found |= more
        parents |= more
    found.discard(os.getpid())
    return [p for p in processes if p.pid in found]


def end_all(
    leaders: Collection[int], descendants_of: int | None = None, unfinished: Callable[[], bool] = lambda: False
) -> list[int]:
    """Kill every process of an attempt, and wait until all are gone.

    One that finishes what it writes (`FINISHES_ITS_WORK`), and what the next attempt is to begin from, has a few
    seconds for that, and more while it gets on: a large state takes long to write, and far longer to be computed again.
    What comes after that, the next attempt does: an upload is not waited for. Alerts are let be and not waited for,
    within their time: they tell of just such an end.

    Args:
        leaders: Workers and whatever has started them; each leads a session.
        descendants_of: A process all of whose descendants belong to the attempt.
        unfinished: Whether there still is something that the next attempt is to begin from.

    Returns:
        Those that do not go, in an uninterruptible call to a driver or a file system.
    """
    if not _LINUX:
        for leader in leaders:
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        return []
    start, killed = time.monotonic(), set[int]()
    spared, seen = start, dict[int, Seen]()
    while True:
        processes = all_processes()
        # A dead parent leads to no child: one that was killed is looked for by its own number, with its session. Once
        # neither is there, the number is free for a stranger.
        killed.intersection_update(number for p in processes for number in (p.pid, p.session))
        left = [p for p in members(processes, {*leaders, *killed}, descendants_of) if not _tells(p.session)]
        _reap(p for p in processes if p.pid in killed and p.pid not in leaders)
        now = time.monotonic()
        if not left or now - spared > GONE_SECONDS:
            return [p.pid for p in left]
        writers = {p.pid for p in left if p.pid not in killed and _finishes_its_work(p.pid, now - start)}
        if writers and not unfinished():
            writers = set()
        elif now - start >= GRACE_SECONDS:
            writers = {pid for pid in writers if gets_on(pid, now, seen)}
        spared = now if writers else spared
        for process in left:
            if process.pid not in writers:
                killed.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)


def _finishes_its_work(pid: int, seconds: float) -> bool:
    """Whether a process is one that may, or has so little begun that it has no command line yet."""
    command = _command(pid)
    return FINISHES_ITS_WORK in command or (not command and seconds < _BEGIN_SECONDS)


def _tells(leader: int) -> bool:
    """Whether the processes of a session tell somebody what is wrong, and are not overdue."""
    return is_alert(_arguments(leader)) and _age_seconds(leader) < LIMIT_SECONDS


def _age_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return math.inf
    # Clock ticks since the machine was started (proc_pid_stat(5), field 22).
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    """What a process had done when it was looked at, since when, and how often since."""

    done: object
    since: float
    looks: int


def gets_on(pid: int, now: float, seen: dict[int, Seen]) -> bool:
    """Whether a process has computed or written anything lately. One look says nothing, however late it is: a virtual
    machine may have stood still, and the process with it.

    Args:
        now: Of the monotonic clock.
        seen: What earlier looks have found, to be kept for the next one.
    """
    done: object = None
    with suppress(OSError):
        # User and system time (proc_pid_stat(5), fields 14 and 15), and bytes given to files.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        done = fields[11:13], Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()[1]
    last = seen.get(pid)
    seen[pid] = Seen(done, now, 0) if last is None or last.done != done else last._replace(looks=last.looks + 1)
    return now - seen[pid].since < IDLE_SECONDS or seen[pid].looks < _LOOKS


def writers_at(folder: Path) -> list[int]:
    """The processes that may finish what they write (`FINISHES_ITS_WORK`) and have a file in a folder open, as far as
    this process can see that."""
    folder = folder.resolve()
    return [p.pid for p in all_processes() if FINISHES_ITS_WORK in _command(p.pid) and _has_open(p.pid, folder)]


def _has_open(pid: int, folder: Path) -> bool:
    with suppress(OSError):  # it has ended, or is somebody else's
        return any(file.readlink().is_relative_to(folder) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _reap(processes: Iterable[ProcessState]) -> None:
    """Take leave of dead children that were adopted; those that were started here are waited for by others."""
    for process in processes:
        if process.parent == os.getpid() and process.state == DEAD:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def ask_for_stacks(files: Mapping[int, Path], seconds: float, stopped: bool = False) -> None:
    """Have processes write their stacks, and wait until all have, or a time has passed.

    Args:
        files: Where each process writes when SIGURG comes, by its number.
        stopped: They are, by SIGSTOP, and shall be again once they have written: they go on for some milliseconds.
    """
    before = {path: _size(path) for path in files.values()}
    for pid in files:
        with suppress(ProcessLookupError):
            _ask_main_thread(pid)
            if stopped:
                os.kill(pid, signal.SIGCONT)
    until, sizes = time.monotonic() + seconds, before
    while time.monotonic() < until:
        time.sleep(0.005)
        last, sizes = sizes, {path: _size(path) for path in before}
        if last == sizes and all(sizes[path] > size for path, size in before.items()):
            break
    for pid in files if stopped else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _ask_main_thread(pid: int) -> None:
    """Of a process that goes on for that, another thread might answer when the main one is elsewhere already."""
    if not _LINUX or ctypes.CDLL(None).tgkill(pid, pid, signal.SIGURG) != 0:
        os.kill(pid, signal.SIGURG)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def reap_orphans(leader: int) -> None:
    """Take leave of adopted descendants that have ended by themselves. For a process with one child of its own."""
    if not _LINUX:
        return
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (dead := os.waitid(os.P_ALL, 0, options)) is not None and dead.si_pid != leader:
            os.waitpid(dead.si_pid, os.WNOHANG)


def _command(pid: int) -> str:
    return " ".join(_arguments(pid))


def _arguments(pid: int) -> list[str]:
    """The command line of a process; empty where there is none to be seen."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").removesuffix("\0").split("\0")
    except OSError:
        return []

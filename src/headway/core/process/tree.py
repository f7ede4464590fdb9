"""The processes of an attempt: their state, and their complete removal.

Each worker leads a session of its own, so all that it starts carries its session number, even what outlives it. A
process that leaves the session is still a descendant. One that does both and loses its parents is found when the
supervisor adopts orphans (`adopt_orphans`).
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
from pathlib import Path

from headway.core.alerts import LIMIT_SECONDS, is_alert
from headway.core.process.table import (
    DEAD,
    LINUX,
    ProcessState,
    Seen,
    all_processes,
    arguments_of,
    continue_stopped,
    finishes_its_work,
    gets_on,
    has_one_thread,
)

#: How long processes may take to finish their writes, and how long killed processes may take to disappear.
GRACE_SECONDS = 5.0
GONE_SECONDS = 30.0
#: How long a process may have no command line: the kernel sets it some time after the start (execve(2)).
_BEGIN_SECONDS = 1.0


def can_be_copied() -> bool:
    """Return whether a copy of this process (`fork`) could train as well as a new process."""
    return has_one_thread() and not _lacks_gpus_when_copied()


def _lacks_gpus_when_copied() -> bool:
    """Return whether copies of this process could not use CUDA.

    They refuse to use it once this process has as much as asked whether there are GPUs (`torch.cuda.is_available`).
    Only a copy knows that, so this makes one and asks it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._is_compiled():
        return False
    copy = os.fork()
    if copy == 0:
        code = 1
        try:
            code = int(torch.cuda._is_in_bad_fork())
        finally:
            os._exit(code)  # the stack frames belong to the process that was copied
    _, status = os.waitpid(copy, 0)
    return status != 0 and torch.cuda.device_count() > 0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents die (Linux). Only for a process without other children."""
    if LINUX:
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def members(
    processes: Iterable[ProcessState],
    leaders: Collection[int],
    descendants_of: int | None = None,
    spared: Collection[int] = (),
) -> list[ProcessState]:
    """Return the processes of some sessions with all their descendants, and the descendants of one process if given.

    Sessions that are spared are left out, with their descendants.
    """
    processes = [p for p in processes if p.state != DEAD]
    if spared:
        families = {p.pid for p in members(processes, spared)} | set(spared)
        processes = [p for p in processes if p.pid not in families]
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
    leaders: Collection[int],
    descendants_of: int | None = None,
    unfinished: Callable[[], bool] = lambda: False,
    spared: Collection[int] = (),
) -> list[int]:
    """Kill every process of an attempt, and wait until all are gone.

    A process that is writing what the next attempt begins from (`table.FINISHES_ITS_WORK`) has a few seconds
    for that, and more while it makes progress: a large state takes long to write, and far longer to be computed again.
    One that is stopped is continued: it finishes its write, or sees that it has none. It is not spared for what the
    next attempt can do itself, such as an upload. Alerts are not killed within their time limit, and not waited for:
    they report just such an end.

    Args:
        leaders: Workers and the processes that have started them; each leads a session.
        descendants_of: A process all of whose descendants belong to the attempt.
        unfinished: Whether a write that the next attempt begins from is still incomplete.
        spared: Sessions that do not belong to the attempt, such as the process that sends metrics to trackers.

    Returns:
        The processes that do not end, because they are in an uninterruptible call to a driver or a file system.
    """
    if not LINUX:
        for leader in leaders:
            with suppress(OSError):
                os.killpg(leader, signal.SIGKILL)
        return []
    start = time.monotonic()
    killed = set[int]()
    spared_at = start
    seen = dict[int, Seen]()
    while True:
        processes = all_processes()
        # A dead parent leads to no child, so a killed process is looked up by its own number, with its session. Once
        # neither exists, the number may be reused by an unrelated process.
        killed.intersection_update(number for p in processes for number in (p.pid, p.session))
        left = [
            p for p in members(processes, {*leaders, *killed}, descendants_of, spared) if not _is_alerting(p.session)
        ]
        _reap(p for p in processes if p.pid in killed and p.pid not in leaders)
        now = time.monotonic()
        if not left or now - spared_at > GONE_SECONDS:
            return [p.pid for p in left]
        writers = {p.pid for p in left if p.pid not in killed and _finishes_its_work(p.pid, now - start)}
        if writers and not unfinished():
            writers = set()
        elif now - start >= GRACE_SECONDS:
            writers = {pid for pid in writers if gets_on(pid, now, seen)}
        spared_at = now if writers else spared_at
        for pid in writers:
            continue_stopped(pid)
        for process in left:
            if process.pid not in writers:
                killed.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.01)


def _finishes_its_work(pid: int, seconds: float) -> bool:
    """Return whether a process may finish its work, or is so new that it has no command line yet."""
    return finishes_its_work(pid) or (seconds < _BEGIN_SECONDS and not arguments_of(pid))


def _is_alerting(leader: int) -> bool:
    """Return whether a session is an alert that is not overdue."""
    return is_alert(arguments_of(leader)) and _age_seconds(leader) < LIMIT_SECONDS


def _age_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return math.inf
    # Clock ticks since the machine was started (proc_pid_stat(5), field 22).
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _reap(processes: Iterable[ProcessState]) -> None:
    """Reap adopted children that have died. Children that were started here are reaped elsewhere."""
    for process in processes:
        if process.parent == os.getpid() and process.state == DEAD:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def ask_for_stacks(files: Mapping[int, Path], seconds: float, stopped: bool = False) -> None:
    """Have processes write their stacks, and wait until all have, or a time has passed.

    Args:
        files: The file to which each process writes on SIGURG, by process number.
        stopped: The processes are stopped by SIGSTOP. They are continued for some milliseconds, then stopped again.
    """
    before = {path: file_size(path) for path in files.values()}
    for pid in files:
        with suppress(ProcessLookupError):
            _ask_main_thread(pid)
            if stopped:
                os.kill(pid, signal.SIGCONT)
    until = time.monotonic() + seconds
    sizes = before
    while time.monotonic() < until:
        time.sleep(0.005)
        last = sizes
        sizes = {path: file_size(path) for path in before}
        if last == sizes and all(sizes[path] > size for path, size in before.items()):
            break
    for pid in files if stopped else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _ask_main_thread(pid: int) -> None:
    """Send SIGURG to the main thread: in a continued process another thread might answer instead."""
    if not LINUX or ctypes.CDLL(None).tgkill(pid, pid, signal.SIGURG) != 0:
        os.kill(pid, signal.SIGURG)


def file_size(path: Path) -> int:
    """Return the size in bytes of a file; 0 if it cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def reap_orphans(leader: int) -> None:
    """Reap adopted descendants that have ended by themselves. Only for a process with one child of its own."""
    if not LINUX:
        return
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (dead := os.waitid(os.P_ALL, 0, options)) is not None and dead.si_pid != leader:
            os.waitpid(dead.si_pid, os.WNOHANG)

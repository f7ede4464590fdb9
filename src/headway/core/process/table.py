"""The process table of this machine, as far as this process can see it (Linux: `/proc`)."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Part of the command line of a process that may finish its write after its worker has ended.
FINISHES_ITS_WORK = "headway.checkpoint.save.writer_process"

#: Seconds without visible work after which such a process counts as stuck; it may wait for the disk.
IDLE_SECONDS = 60.0
#: Least number of looks that found no work.
_LOOKS = 50

STOPPED = "T"
TRACED = "t"
DEAD = "Z"
UNINTERRUPTIBLE = "D"
_STATES = {
    "R": "runs",
    "S": "waits",
    UNINTERRUPTIBLE: "is in an uninterruptible call of the kernel",
    STOPPED: "was stopped by a signal (SIGSTOP) and has not been continued",
    TRACED: "is held by a debugger",
    DEAD: "has ended",
}
LINUX = sys.platform == "linux"


@dataclass(frozen=True)
class ProcessState:
    """A line of the process table."""

    pid: int
    state: str
    """As `ps` shows it: R, S, D (uninterruptible), T (stopped), t (traced), Z (dead, not yet waited for)."""
    parent: int
    session: int
    wait_status: int | None = None
    """Wait status of a dead process, where known."""


def process_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None when it does not exist. Outside Linux only its existence is known."""
    if not LINUX:
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
    """Return all processes that this one can see; none where there is no /proc."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()) if LINUX else ()
    return [found for pid in pids if (found := process_state(pid)) is not None]


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's living children, as far as they are visible."""
    return [found.pid for found in all_processes() if found.parent == pid and found.state != DEAD]


def what_it_does(pid: int) -> str:
    """Describe the state of a process, with the kernel function in which it waits where that is readable."""
    state = process_state(pid)
    if state is None:
        return "is gone"
    where = "0"
    with suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8", errors="replace").partition(".")[0] or where
    return _STATES.get(state.state, f"has state {state.state}") + (f" ({where})" if where != "0" else "")


def has_one_thread() -> bool:
    """Return whether this process has one thread, native ones included.

    A forked copy would lack the other threads, while the locks that they hold would stay locked.
    """
    return LINUX and len(list(Path("/proc/self/task").iterdir())) == 1


def continue_stopped(pid: int) -> None:
    """Continue a process that a signal has stopped: it can neither finish its work nor see that there is none."""
    state = process_state(pid)
    if state is not None and state.state == STOPPED:
        with suppress(OSError):  # it has ended meanwhile, or belongs to another user
            os.kill(pid, signal.SIGCONT)


class Seen(NamedTuple):
    """The work a process had done at a look, since when it has done no more, and the number of looks since."""

    done: object
    since: float
    looks: int


def gets_on(pid: int, now: float, seen: dict[int, Seen]) -> bool:
    """Return whether a process has computed or written anything lately.

    Several looks are needed, however far apart they are: a virtual machine may have been paused, and the process with
    it.

    Args:
        pid: The process.
        now: Time of the monotonic clock.
        seen: Results of earlier looks by process id; updated for the next look.
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
    """Return the processes that may finish their writes (`FINISHES_ITS_WORK`) and have a file in a folder open.

    Only processes that this one can see are found.
    """
    folder = folder.resolve()
    return [p.pid for p in all_processes() if finishes_its_work(p.pid) and _has_open(p.pid, folder)]


def _has_open(pid: int, folder: Path) -> bool:
    with suppress(OSError):  # it has ended, or belongs to another user
        return any(file.readlink().is_relative_to(folder) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def finishes_its_work(pid: int) -> bool:
    """Return whether a process may finish its write after its worker has ended (`FINISHES_ITS_WORK`)."""
    return FINISHES_ITS_WORK in " ".join(arguments_of(pid))


def arguments_of(pid: int) -> list[str]:
    """Return the command line of a process; empty where it is not visible."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").removesuffix("\0").split("\0")
    except OSError:
        return []

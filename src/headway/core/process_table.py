"""The processes of this machine, as far as this process can see them (Linux: `/proc`)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Part of the command line of a process that may finish what it writes when its worker is gone.
FINISHES_ITS_WORK = "headway.checkpoint.save.writer_process"

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
    """Of a dead one, where it can be known."""


def process_state(pid: int) -> ProcessState | None:
    """The state of a process; None when there is none. Elsewhere than on Linux all that can be told is that it is."""
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
    """Those that this process can see; none where there is no /proc."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()) if LINUX else ()
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


def has_one_thread() -> bool:
    """Whether there are no others, native ones too: they would be missing in a copy, with locks in hand."""
    return LINUX and len(list(Path("/proc/self/task").iterdir())) == 1


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
    return [p.pid for p in all_processes() if finishes_its_work(p.pid) and _has_open(p.pid, folder)]


def _has_open(pid: int, folder: Path) -> bool:
    with suppress(OSError):  # it has ended, or is somebody else's
        return any(file.readlink().is_relative_to(folder) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def finishes_its_work(pid: int) -> bool:
    """Return whether a process is one that may finish what it writes (`FINISHES_ITS_WORK`)."""
    return FINISHES_ITS_WORK in " ".join(arguments_of(pid))


def arguments_of(pid: int) -> list[str]:
    """The command line of a process; empty where there is none to be seen."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").removesuffix("\0").split("\0")
    except OSError:
        return []

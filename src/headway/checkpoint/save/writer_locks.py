"""Locks of writer processes: each process holds one for as long as it lives.

A writer process may outlive its killed worker. The next attempt waits for it, since its work would be lost otherwise.
And no writer process waits for the part of one that is dead.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headway.core.files.foreign import SETTINGS_BYTES, read_bytes
from headway.core.machine.system import host_name
from headway.core.process.waiting import wait_until

#: Folder of the lock files in a run directory.
WRITERS_FOLDER = ".writers"


def open_writer_lock(run: Path, rank: int) -> int:
    """Open and lock the lock file of a worker's writer process.

    Returns:
        A file descriptor. The lock holds until the last process that has it open closes it.

    Raises:
        OSError: The file cannot be made.
    """
    path = _lock_of(run, rank)
    host = host_name().encode()
    with suppress(OSError):
        _lost_mark(run, rank).unlink(missing_ok=True)
    # The successor of a process that hung on the disk must not write here, nor even open the file to write.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # should it be a FIFO
        if os.pread(descriptor, len(host) + 1, 0) == host:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            return descriptor
        os.close(descriptor)
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):  # on a full disk, the only loss is that others cannot tell whether this process has ended
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, host, 0)
    return descriptor


def writer_has_ended(run: Path, rank: int) -> bool:
    """Return whether a worker's writer process is known to have ended.

    The result is also False if that cannot be known: on a file system without locks, and for a process on another
    machine, whose locks many file systems do not show.
    """
    try:
        return writer_is_here(run, rank) and _is_unlocked(_lock_of(run, rank))
    except OSError:
        return False


def mark_lost(run: Path, ranks: Iterable[int]) -> None:
    """Note that the machine of some workers is lost, whose locks say nothing here."""
    with suppress(OSError):
        for rank in ranks:
            _lost_mark(run, rank).touch()


def is_marked_lost(run: Path, rank: int) -> bool:
    """Return whether the machine of a worker is lost, and no successor of its writer process has begun."""
    return _lost_mark(run, rank).exists()


def writer_is_here(run: Path, rank: int) -> bool:
    """Return whether a worker's writer process is known to run, or to have run, on this machine."""
    with suppress(OSError):
        return read_bytes(_lock_of(run, rank), SETTINGS_BYTES).decode("utf-8", "replace") == host_name()
    return False


def wait_for_writers(run: Path, seconds: float) -> bool:
    """Wait for writer processes of earlier attempts to finish, and return whether all have ended."""
    try:
        return wait_until(lambda: all(map(_is_unlocked, (run / WRITERS_FOLDER).glob("*"))), seconds)
    except OSError:  # a file system without locks: do not wait
        return False


def _lock_of(run: Path, rank: int) -> Path:
    return run / WRITERS_FOLDER / f"{rank:05d}"


def _lost_mark(run: Path, rank: int) -> Path:
    return run / WRITERS_FOLDER / f"{rank:05d}.lost"


def _is_unlocked(path: Path) -> bool:
    if not path.exists():
        return True
    # NFS emulates flock by locks that need a file opened for writing to be exclusive (flock(2)).
    with path.open("r+b") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

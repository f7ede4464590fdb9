"""Which processes that write checkpoints of a run have not ended: each holds a lock for as long as it lives.

They may go on when their workers were killed. A run is not taken over before they have ended, or what they do would be
thrown away; and none of them waits for what a dead one was to write.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from headway.core.foreign import SETTINGS_BYTES, read_bytes
from headway.core.machine import host_name
from headway.core.waiting import wait_until

#: In a run directory: the files that they have locked.
WRITERS_FOLDER = ".writers"


def open_writer_lock(run: Path, rank: int) -> int:
    """A file descriptor that stands for the process that writes checkpoints of a worker, as long as any process has it
    open.

    Raises:
        OSError: it cannot be made.
    """
    path, host = _lock_of(run, rank), host_name().encode()
    # A successor asks for nothing that a disk which hangs would not let pass, not even to be allowed to write.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # should it be a FIFO
        if os.pread(descriptor, len(host) + 1, 0) == host:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            return descriptor
        os.close(descriptor)
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with suppress(OSError):  # where the disk is full, nothing is known of this process, and no more
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, host, 0)
    return descriptor


def writer_has_ended(run: Path, rank: int) -> bool:
    """Whether no process writes checkpoints of a worker any more; False also where that cannot be known: on a file
    system without locks, and of another machine, whose locks many file systems do not show."""
    try:
        return writer_is_here(run, rank) and _nobody_has(_lock_of(run, rank))
    except OSError:
        return False


def writer_is_here(run: Path, rank: int) -> bool:
    """Whether the process that writes checkpoints of a worker is, or was, on this machine, as far as that is known."""
    with suppress(OSError):
        return read_bytes(_lock_of(run, rank), SETTINGS_BYTES).decode("utf-8", "replace") == host_name()
    return False


def wait_for_writers(run: Path, seconds: float) -> bool:
    """Let processes of earlier attempts end the checkpoints that were handed to them; whether all have ended."""
    try:
        return wait_until(lambda: all(map(_nobody_has, (run / WRITERS_FOLDER).glob("*"))), seconds)
    except OSError:  # a file system without locks: nobody waits for anybody
        return False


def _lock_of(run: Path, rank: int) -> Path:
    return run / WRITERS_FOLDER / f"{rank:05d}"


def _nobody_has(path: Path) -> bool:
    if not path.exists():
        return True
    # On NFS, whose locks are of another kind, nobody has a file for himself who has not opened it to write.
    with path.open("r+b") as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False

"""A reserve of space in a run directory, which is given up when the disk is full, so that records are still written.

A checkpoint that does not fit is tried again later. A record that does not fit would be lost with its process, and with
it the reason why the run ended. So an attempt allocates a file at its start and removes it at its end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

RESERVE_FILE = ".reserve"
RESERVE_BYTES = 8 * 2**20

#: A quota that is used up is a full disk to whoever may not go beyond it.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_Result = TypeVar("_Result")


def take_reserve(run: Path) -> None:
    """Allocate the reserve of a run directory; one that is there and whole is kept.

    Raises:
        OSError: There is no room for it, or the file system takes no file of that size. Nothing is left of it then.
    """
    path = run / RESERVE_FILE
    if _allocated_bytes(path) >= RESERVE_BYTES:
        return
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Blocks that are allocated count towards a quota. Where nothing is allocated ahead (macOS), or where zeros are
        # compressed away (ZFS), only bytes that cannot be compressed take the space.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
        if _allocated_bytes(path) < RESERVE_BYTES:
            rest = memoryview(os.urandom(RESERVE_BYTES))
            os.lseek(descriptor, 0, os.SEEK_SET)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)


def free_reserve(run: Path) -> bool:
    """Remove the reserve of a run directory, and return whether there was one."""
    try:
        (run / RESERVE_FILE).unlink()
    except OSError:
        return False
    return True


def write_with_reserve(run: Path, write: Callable[[], _Result]) -> _Result:
    """Write a record of a run; if the disk is full, give up the reserve and write once more.

    Args:
        run: The run directory.
        write: Writes the record. A second call must be able to follow one that has failed.

    Raises:
        OSError: As `write`, if there is no reserve, or it was not enough.
    """
    try:
        return write()
    except OSError as error:
        if error.errno not in _FULL or not free_reserve(run):
            raise
    return write()


def _allocated_bytes(path: Path) -> int:
    """Return how much of a disk a regular file takes; 0 without one. A sparse file is smaller there than its size."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_blocks * 512

"""Locks on files, and whether a path still names the file that is locked."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headway.core.files.foreign import open_regular


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether the path still names the file that is open at a descriptor."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def locked_folder(folder: Path, *, waits: bool = True) -> Iterator[None]:
    """Lock a folder during a block; a file system without locks gives no protection.

    Args:
        folder: The folder.
        waits: Wait for another process that holds the lock; otherwise the block runs without it.

    Raises:
        OSError: the folder cannot be opened.
    """
    how = fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file now; the file is created if it does not exist.

    Raises:
        OSError: as `lock_file`.
    """
    try:
        lock_file(path).close()
    except BlockingIOError:
        return True
    return False


def lock_file(path: Path) -> BinaryIO:
    """Lock a file exclusively, and create it if it does not exist; the lock ends when the returned file is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened, or the file system does not support locks.
    """
    while True:
        path.touch()
        file = open_regular(path, "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the file was moved away or removed between the two calls, the lock is on the wrong one.
            if is_at(path, file.fileno()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()

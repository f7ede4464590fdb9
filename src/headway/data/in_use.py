"""Locks on stores in use, so that a preparation does not replace a store that a training reads.

A training maps shards lazily, and can only be resumed with the same store. So during a run, its supervisor (or its only
process) holds a shared lock (`flock`) on the store's manifest. The system releases the lock with the last process that
holds it, however that process ends. Replacing the store needs the exclusive lock, or must keep the files that the
holders read (`headway.data.used_by`). A file system without locks gives no protection.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.core.errors import DataError
from headway.core.files.locks import is_at

# A copy of `store.MANIFEST`: importing that module would load NumPy, whose threads make it unsafe to fork a supervisor.
_MANIFEST = "manifest.json"
# A store is rarely replaced twice in a row, but some file systems have unreliable inode numbers.
_TRIES = 5


@contextmanager
def in_use(store: Path) -> Iterator[None]:
    """Prevent replacement of the store in folder `store`, if there is one, during a block."""
    descriptor = _share(store / _MANIFEST)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _share(manifest: Path) -> int | None:
    """Take the shared lock of the present store; wait while the store is being replaced."""
    for _ in range(_TRIES):
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_NONBLOCK)  # do not block on a FIFO
        except OSError:  # the reader of the store reports it
            return None
        is_shared = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_shared := is_at(manifest, descriptor):
                return descriptor
        except OSError:
            return None
        finally:
            if not is_shared:  # also when a signal interrupts the wait
                os.close(descriptor)
    return None


def check_not_in_use(store: Path, keeps_for: Collection[int] = ()) -> None:
    """Check that no training reads a store that is to be replaced.

    Args:
        store: The folder.
        keeps_for: Processes of trainings whose shards will be kept.

    Raises:
        DataError: another training reads it.
    """
    with replacing(store, keeps_for):
        pass


@contextmanager
def replacing(store: Path, keeps_for: Collection[int] = ()) -> Iterator[None]:
    """Hold the exclusive lock of the store in folder `store` during a block that replaces it.

    Args:
        store: The folder.
        keeps_for: Processes of trainings whose shards will be kept; these may continue.

    Raises:
        DataError: another training reads it.
    """
    descriptor = _opened(store / _MANIFEST)
    try:
        if descriptor is not None:
            _lock_alone(descriptor, store, keeps_for)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(manifest: Path) -> int | None:
    # On NFS, an exclusive lock needs a file that is open for writing.
    for mode in (os.O_RDWR, os.O_RDONLY):
        with suppress(OSError):
            return os.open(manifest, mode | os.O_NONBLOCK)
    return None


def _lock_alone(descriptor: int, store: Path, keeps_for: Collection[int]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holders = _lock_holders(os.fstat(descriptor).st_ino)
        if holders and holders <= set(keeps_for):
            return
        raise DataError(
            "a training reads this token store and cannot continue with another",
            where=str(store),
            fix="wait until that run has ended, or set data.store to prepare another",
        ) from None
    except OSError:  # a file system without locks
        return


def _lock_holders(inode: int) -> set[int] | None:
    """Return the processes that hold a lock on a file, from the system's lock table; None if there is no such table."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = (line.split() for line in lines if "->" not in line)
    return {int(f[4]) for f in fields if len(f) > 5 and f[1] == "FLOCK" and f[5].rpartition(":")[2] == str(inode)}

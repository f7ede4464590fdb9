"""Which stores a training reads, so that no preparation takes them away from under it.

A training maps shards as it comes to them, and can only be resumed with the very store that it has. So for as long as a
run goes on, its supervisor (or its only process) shares a lock (`flock`) on the store's manifest, which the system
releases with the last process that has it open, however that ends; who puts another store in its place needs that lock
alone, or keeps what those who share it read (`headway.data.used_by`). Where the file system has no locks, nobody is
kept out.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.core.errors import DataError
from headway.core.files import is_at

# `store.MANIFEST`; but that module loads NumPy, whose threads would keep a supervisor from being copied.
_MANIFEST = "manifest.json"
# A store is hardly replaced twice in a row; but there are file systems whose inode numbers tell nothing.
_TRIES = 5


@contextmanager
def in_use(store: Path) -> Iterator[None]:
    """Keep the store in folder `store`, if there is one, in its place for the length of a block."""
    descriptor = _share(store / _MANIFEST)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _share(manifest: Path) -> int | None:
    """Share the lock of the store that is here now; waits for the moment in which it is being replaced."""
    for _ in range(_TRIES):
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_NONBLOCK)  # should it be a FIFO
        except OSError:  # whoever reads it says so
            return None
        is_shared = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if is_shared := is_at(manifest, descriptor):
                return descriptor
        except OSError:
            return None
        finally:
            if not is_shared:  # also when a signal comes while it waits
                os.close(descriptor)
    return None


def check_not_in_use(store: Path, keeps_for: Collection[int] = ()) -> None:
    """Refuse to begin what would put another store in the place of one that a training reads.

    Args:
        store: The folder.
        keeps_for: Processes of trainings whose shards will still be there.

    Raises:
        DataError: another training reads it.
    """
    with replacing(store, keeps_for):
        pass


@contextmanager
def replacing(store: Path, keeps_for: Collection[int] = ()) -> Iterator[None]:
    """Let no training begin to read the store in folder `store` for the length of a block, in which it is replaced.

    Args:
        store: The folder.
        keeps_for: Processes of trainings whose shards will still be there; these may go on.

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
    # On NFS, whose locks are of another kind, nobody has a file for himself who has not opened it to write.
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
            "a training reads this token store, and goes on with no other",
            where=str(store),
            fix="wait until that run has ended, or set data.store to prepare another",
        ) from None
    except OSError:  # a file system without locks
        return


def _lock_holders(inode: int) -> set[int] | None:
    """Processes that hold a lock on a file, by the system's table; None where there is none to ask."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = (line.split() for line in lines if "->" not in line)
    return {int(f[4]) for f in fields if len(f) > 5 and f[1] == "FLOCK" and f[5].rpartition(":")[2] == str(inode)}

"""Ownership of a run directory: a lock that ends with its holder, and a fencing token in the lock file.

The lock (flock on `.owner`) excludes a second launcher on one machine and on file systems that share locks. It does not
stop a worker that outlives its launcher, or that a network file system cut off. So every attempt also writes its token
into the file, and each process compares tokens before it publishes anything.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from headway.checkpoint.save.writer_locks import WRITERS_FOLDER, wait_for_writers
from headway.core.console import notice
from headway.core.coordination.lease import OWNER_FILE, RECORD_BYTES, new_lease, write_lease
from headway.core.coordination.owner import Owner, read_owner
from headway.core.errors import CheckpointError, fix_for
from headway.core.files.locks import lock_file
from headway.core.machine.system import host_name
from headway.core.process.table import Seen, continue_stopped, gets_on, writers_at
from headway.core.process.waiting import wait_until

#: How often the lease is renewed.
_RENEW_SECONDS = 5.0
#: How long to wait for the write. It usually takes microseconds.
_WRITE_SECONDS = 1.0
#: A little more than the time that an NFS server keeps the lock of a dead machine (Linux: `nfsv4leasetime`, 90 s).
_LEASE_SECONDS = 100.0


class OwnerLock:
    """The exclusive lock on a run directory, held until `release` or the end of this process, however it ends."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path
        self._attempt: int | None = None
        self._began = math.nan
        self._renewed = -math.inf
        self._renewal: threading.Thread | None = None
        # A forked child would share the lock and keep it after this process is gone.
        os.register_at_fork(after_in_child=file.close)

    @classmethod
    def take(cls, run: Path) -> OwnerLock:
        """Lock an existing run directory.

        Raises:
            CheckpointError: Another process holds the lock, or the file system does not support locks.
        """
        path = run / OWNER_FILE
        try:
            return cls(lock_file(path), path)
        except BlockingIOError:
            owner = read_owner(run)
            raise CheckpointError(
                f"the run is in use by {owner or 'another process'}",
                where=str(run),
                fix="wait for it to end, stop it, or choose another name=...",
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"the run directory cannot be locked: {error.strerror}",
                where=str(path),
                fix=fix_for(
                    error, "make room there, or choose a folder that takes files and supports locks (runs=...)"
                ),
            ) from error

    def write(self, owner: Owner, began: float | None = None) -> None:
        """Write the record of a new owner, which fences every earlier one.

        Args:
            owner: The new owner.
            began: Start of its attempt by the monotonic clock; now when not given.

        Raises:
            OSError: The record cannot be written.
        """
        now = time.monotonic()
        self._began = now if began is None else began
        record = json.dumps(asdict(owner)).encode().ljust(RECORD_BYTES) + new_lease(owner.attempt, now - self._began)
        os.pwrite(self._file.fileno(), record, 0)
        os.fsync(self._file.fileno())
        self._attempt = owner.attempt
        self._renewed = now

    def seconds_since(self, attempt: int) -> float | None:
        """Return for how many seconds an attempt has begun, by the monotonic clock; None unless it is the newest that
        this lock was written for."""
        return time.monotonic() - self._began if self._attempt == attempt else None

    def renew(self) -> None:
        """Renew the owner's lease if it is time to. Call it more often than that.

        A thread writes, since the disk may hang, and ends when it is done: a process with another thread cannot be
        copied into the next attempt process.
        """
        now = time.monotonic()
        if self._attempt is None or now - self._renewed < _RENEW_SECONDS:
            return
        if self._renewal is not None and self._renewal.is_alive():
            return
        self._renewed = now
        self._renewal = threading.Thread(
            target=write_lease,
            args=(self._path, self._attempt, now - self._began),
            name="headway-lease",
            daemon=True,
        )
        self._renewal.start()
        self._renewal.join(_WRITE_SECONDS)

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the lease for the length of a block on a thread, in a process that is not copied."""
        ends = threading.Event()

        def work() -> None:
            while not ends.wait(_RENEW_SECONDS):
                self.renew()

        thread = threading.Thread(target=work, name="headway-lease-clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ends.set()

    def release(self) -> None:
        """Release the lock; safe to call twice."""
        self._file.close()

    def __enter__(self) -> OwnerLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def wait_for_dead_machine(run: Path, is_over: Callable[[], object] = lambda: False) -> None:
    """Wait until a network file system would have released the lock of another machine, if that machine is dead.

    There is no way to ask whether it is. If the lock is still held afterwards, its holder is alive, and `take` fails.

    Args:
        run: The run directory.
        is_over: Return whether to stop waiting.
    """
    owner = read_owner(run)
    if owner is None or owner.host == host_name() or is_free(run):
        return
    notice(
        f"the run is held by {owner}; waiting {_LEASE_SECONDS:.0f} s, after which the lock of a dead machine expires"
    )
    wait_until(lambda: is_over() or is_free(run), _LEASE_SECONDS, 0.2)


def wait_for_orphaned_writers(run: Path, is_over: Callable[[], object] = lambda: False) -> None:
    """Wait for writer processes of a dead attempt on this machine, as long as they make progress.

    Once the next attempt has begun, they could no longer publish their checkpoint. A run that is in use is not waited
    for.

    Args:
        run: The run directory.
        is_over: Return whether to stop waiting.
    """
    if wait_for_writers(run, 0.0) or not is_free(run) or not (pids := writers_at(run / WRITERS_FOLDER)):
        return
    process = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    notice(f"waiting for the checkpoint that {process} of an attempt that died still write{'s' * (len(pids) == 1)}")
    seen = dict[int, Seen]()

    def has_ended() -> bool:
        now = time.monotonic()
        for pid in pids:
            continue_stopped(pid)
        return wait_for_writers(run, 0.0) or not [pid for pid in pids if gets_on(pid, now, seen)]

    wait_until(lambda: is_over() or has_ended(), math.inf, 0.1)


def is_free(run: Path) -> bool:
    """Return whether no process holds the lock of a run directory, as far as this machine sees."""
    with suppress(CheckpointError):
        OwnerLock.take(run).release()
        return True
    return False

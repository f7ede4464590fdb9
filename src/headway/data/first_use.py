"""Background verification of shards against the manifest's SHA-256, when they are first opened.

A thread reads each shard once, at the speed of the disk, while training continues. It marks a verified shard in a file
of the store, keyed by the file's metadata (length, times, inode), so that other workers and later attempts skip it. A
shard that another process is reading waits for that process. If the store cannot be written or has no locks, every
process verifies for itself.

Training may use rows of a shard before its verification is done. So a checkpoint save first waits for pending
verifications (`wait_verified`), and a damaged shard ends the run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import DataError
from headway.core.files.foreign import open_regular
from headway.core.user_command import suggest

#: File of the store with the marks of verified shards.
VERIFIED = ".verified"
_BLOCK = 2**22
# The mark file is a sparse hash table with this many entries.
_PLACES = 2**20
_MARK_BYTES = 16
# Seconds between polls of a shard that another process verifies, and of the queue in `wait_verified`.
_POLL_SECONDS = 0.05
# Assumed bytes per second before the first measurement.
_EXPECTED = 2e8
# Low priority: training needs the processor.
_NICE = 10


class WrongShardError(DataError):
    """A shard that training has opened does not match the manifest."""


@dataclass(frozen=True)
class _Opened:
    path: Path
    bytes: int
    sha256: str
    has_ids: bool = True


class ShardChecker:
    """Checks the shards of one store, each once when it is first opened.

    Args:
        store: Folder of the store.
        dtype: Data type of the token ids.
        vocab_size: Upper limit (exclusive) of the ids.
    """

    def __init__(self, store: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._marks = _Marks(store / VERIFIED)
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._seen: set[Path] = set()
        self._waiting: deque[_Opened] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._read_bytes = 0
        self._read_seconds = 0.0
        self._unverified_since: int | None = None
        self._wrong: tuple[Path, str] | None = None

    def opened(self, path: Path, size: int, sha256: str, *, has_ids: bool = True) -> None:
        """Queue a file for verification, unless it was queued before; `has_ids` if it holds token ids."""
        with self._changed:
            if path in self._seen:
                return
            self._seen.add(path)
            self._waiting.append(_Opened(path, size, sha256, has_ids))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headway-verify", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check_verified(self) -> None:
        """Raise an error if a damaged shard has been found.

        Raises:
            WrongShardError: a shard does not match the manifest.
        """
        if self._wrong is None:
            return
        path, problem = self._wrong
        back = (
            ""
            if self._unverified_since is None
            else f", and first roll back to a checkpoint before step {self._unverified_since} (headway checkpoints"
            " restore): later ones may have been trained on it"
        )
        raise WrongShardError(
            f"a shard of the token store is damaged: {problem}",
            where=str(path),
            fix=f"{suggest('data prepare', '--repair')}, or restore it{back}; then run the same command again",
        )

    def wait_verified(self, step: int, seconds: float, beat: Callable[[], None] = lambda: None) -> bool:
        """Wait until every opened shard is verified, unless that is expected to take too long.

        Args:
            step: Step of the state that is about to be saved.
            seconds: Longest time to wait.
            beat: Called regularly during the wait.

        Returns:
            Whether every opened shard is verified.

        Raises:
            WrongShardError: a shard does not match the manifest.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting and self._wrong is None and self._seconds_left() <= until - time.monotonic():
                self._changed.wait(_POLL_SECONDS)
                beat()
            verified = not self._waiting
            if verified:
                self._unverified_since = None
            elif self._wrong is None and self._unverified_since is None:
                self._unverified_since = step
        self.check_verified()
        return verified

    def _seconds_left(self) -> float:
        """Estimate the seconds that the queue needs, from the read speed so far."""
        rate = self._read_bytes / self._read_seconds if self._read_seconds else _EXPECTED
        return sum(item.bytes for item in self._waiting) / max(1.0, rate)

    def _work(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._wrong is None:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                item = self._waiting[0]
            try:
                problem, done = self._verify(item)
            except Exception as error:  # `wait_verified` must get an answer
                problem = f"it cannot be checked: {error!r}"
                done = True
            with self._changed:
                if problem is not None:
                    self._wrong = (item.path, problem)
                elif done:
                    self._waiting.popleft()
                else:  # another process is verifying it
                    self._waiting.rotate(-1)
                self._changed.notify_all()
            if not done:
                time.sleep(_POLL_SECONDS)

    def _verify(self, item: _Opened) -> tuple[str | None, bool]:
        """Verify a shard; return its problem, if any, and whether the verification is done."""
        try:
            with open_regular(item.path) as file:
                mark = _mark(item, os.fstat(file.fileno()))
                with self._marks.claimed(mark) as state:
                    if state == "busy":
                        return None, False
                    if state == "right":
                        return None, True
                    problem = self._problem(item, file.fileno())
                    if problem is None and _mark(item, os.fstat(file.fileno())) == mark:
                        self._marks.put(mark)
                    return problem, True
        except FileNotFoundError:
            return None, True  # an evicted copy of a remote shard; a new copy is verified when it is opened
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}", True

    def _problem(self, item: _Opened, descriptor: int) -> str | None:
        started = time.monotonic()
        hashed = hashlib.sha256()
        largest = 0
        done = 0
        while block := os.pread(descriptor, _BLOCK, done):
            hashed.update(block)
            done += len(block)
            whole = (len(block) - len(block) % self._dtype.itemsize) if item.has_ids else 0
            largest = max(largest, int(np.frombuffer(block[:whole], self._dtype).max(initial=0)))
        self._read_bytes += done
        self._read_seconds += time.monotonic() - started
        if done != item.bytes:
            return f"{done} bytes long, not {item.bytes}"
        if hashed.hexdigest() != item.sha256:
            return "its SHA-256 is not the manifest's"
        if largest >= self._vocab_size:
            return f"it has the id {largest:,}, but the vocabulary ends at {self._vocab_size - 1:,}"
        return None


def _mark(item: _Opened, found: os.stat_result) -> bytes:
    """Return the mark of a file in its present state."""
    facts = (item.path.name, item.sha256, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    return hashlib.blake2b(repr(facts).encode(), digest_size=_MARK_BYTES).digest()


class _Marks:
    """The verified files, shared by all processes that read a store.

    A hash of the mark gives its place. If two marks collide, the later one stays, and the other file is read again.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @contextmanager
    def claimed(self, mark: bytes) -> Iterator[str]:
        """Lock the file of a mark against verification by other processes.

        Yields `right` if the file has been verified, `busy` if another process is verifying it, else `unknown`.
        """
        if self._descriptor is None:
            yield "unknown"
            return
        place = _place(mark)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _MARK_BYTES, place)
        except (BlockingIOError, PermissionError):  # depends on the system
            yield "busy"
            return
        except OSError:  # a file system without locks
            yield "unknown"
            return
        try:
            yield "right" if os.pread(self._descriptor, _MARK_BYTES, place) == mark else "unknown"
        finally:
            with suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _MARK_BYTES, place)

    def put(self, mark: bytes) -> None:
        """Record that a file has been verified."""
        if self._descriptor is not None:
            with suppress(OSError):  # without a mark the file is read again
                os.pwrite(self._descriptor, mark, _place(mark))


def _place(mark: bytes) -> int:
    return int.from_bytes(mark[:8], "little") % _PLACES * _MARK_BYTES

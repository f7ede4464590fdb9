"""Shards are checked against the manifest's SHA-256 when they are first opened, while training goes on.

A thread reads each of them once, at the speed of the disk. What it has found right is marked in a file of the store, by
what the system tells of a file (length, times, inode), so that other workers and later attempts need not read it again;
a shard that another process is reading right now waits until that one is done. Where the store cannot be written or has
no locks, every process checks for itself.

Rows of a shard may be used before it has been read through. So who saves a state asks first (`settle`), and what is
found wrong ends the run.
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
from headway.core.foreign import open_regular

#: File of a store with the marks.
VERIFIED = ".verified"
_BLOCK = 2**22
# The file of marks is a table of so many places, most of which are a hole in it.
_PLACES, _MARK_BYTES = 2**20, 16
# Seconds between two looks for what another process is at, and while somebody waits.
_LOOK_SECONDS = 0.05
# Bytes a second that are expected while none have been read.
_EXPECTED = 2e8
# The thread is to leave the processor to training.
_NICE = 10


class WrongShardError(DataError):
    """A shard that training has opened is not what the manifest says."""


@dataclass(frozen=True)
class _Opened:
    path: Path
    bytes: int
    sha256: str


class ShardChecker:
    """Checks the shards of one store, each once when it is first opened.

    Args:
        store: Folder of the store.
        dtype: Of its ids.
        vocab_size: Every id is below it.
    """

    def __init__(self, store: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._marks = _Marks(store / VERIFIED)
        self._dtype, self._vocab_size = dtype, vocab_size
        self._seen: set[Path] = set()
        self._waiting: deque[_Opened] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._read_bytes, self._read_seconds = 0, 0.0
        self._doubtful: int | None = None
        self._wrong: tuple[Path, str] | None = None

    def opened(self, path: Path, size: int, sha256: str) -> None:
        """Have a shard checked, unless it has been or is going to be."""
        with self._changed:
            if path in self._seen:
                return
            self._seen.add(path)
            self._waiting.append(_Opened(path, size, sha256))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="headway-verify", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def check_verified(self) -> None:
        """Raise what has been found, if anything.

        Raises:
            WrongShardError: a shard is not what the manifest says.
        """
        if self._wrong is None:
            return
        path, problem = self._wrong
        back = (
            ""
            if self._doubtful is None
            else f", and go back behind step {self._doubtful} first (headway checkpoints restore): from there on"
            " checkpoints may have been trained on it"
        )
        raise WrongShardError(
            f"a shard of the token store is damaged: {problem}",
            where=str(path),
            fix=f"headway data prepare CONFIG --repair, or restore it{back}; then run the same command again",
        )

    def settle(self, step: int, seconds: float, beat: Callable[[], None] = lambda: None) -> bool:
        """Wait until all that was opened has been checked, if that can be expected within so many seconds.

        Args:
            step: Of the state that is about to be saved.
            seconds: How long it may take.
            beat: Called while it waits.

        Returns:
            Whether all of it has been.

        Raises:
            WrongShardError: a shard is not what the manifest says.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting and self._wrong is None and self._seconds_left() <= until - time.monotonic():
                self._changed.wait(_LOOK_SECONDS)
                beat()
            settled = not self._waiting
            if settled:
                self._doubtful = None
            elif self._wrong is None and self._doubtful is None:
                self._doubtful = step
        self.check_verified()
        return settled

    def _seconds_left(self) -> float:
        """How long what waits will take, by what has been read so far."""
        rate = self._read_bytes / self._read_seconds if self._read_seconds else _EXPECTED
        return sum(item.bytes for item in self._waiting) / max(1.0, rate)

    def _work(self) -> None:
        with suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._wrong is None:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                item = self._waiting[0]
            try:
                problem, done = self._look(item)
            except Exception as error:  # somebody waits for an answer
                problem, done = f"it cannot be checked: {error!r}", True
            with self._changed:
                if problem is not None:
                    self._wrong = (item.path, problem)
                elif done:
                    self._waiting.popleft()
                else:  # another process is at it
                    self._waiting.rotate(-1)
                self._changed.notify_all()
            if not done:
                time.sleep(_LOOK_SECONDS)

    def _look(self, item: _Opened) -> tuple[str | None, bool]:
        """What is wrong with a shard, and whether that is known now."""
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
            return None, True  # a copy of a remote shard that nobody uses any more; the next one is checked as it comes
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}", True

    def _problem(self, item: _Opened, descriptor: int) -> str | None:
        started = time.monotonic()
        hashed, largest, done = hashlib.sha256(), 0, 0
        while block := os.pread(descriptor, _BLOCK, done):
            hashed.update(block)
            done += len(block)
            whole = len(block) - len(block) % self._dtype.itemsize
            largest = max(largest, int(np.frombuffer(block[:whole], self._dtype).max(initial=0)))
        self._read_bytes += done
        self._read_seconds += time.monotonic() - started
        if done != item.bytes:
            return f"{done} bytes long, not {item.bytes}"
        if hashed.hexdigest() != item.sha256:
            return "its SHA-256 is not the manifest's"
        if largest >= self._vocab_size:
            return f"it has the id {largest:,}, and the vocabulary ends at {self._vocab_size - 1:,}"
        return None


def _mark(item: _Opened, found: os.stat_result) -> bytes:
    """What stands for a file that is as it is now."""
    facts = (item.path.name, item.sha256, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    return hashlib.blake2b(repr(facts).encode(), digest_size=_MARK_BYTES).digest()


class _Marks:
    """Files that have been found right, for all processes that read a store.

    A mark's place is a hash of it; of two with the same place the later one stays, and the other file is read again.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    @contextmanager
    def claimed(self, mark: bytes) -> Iterator[str]:
        """Keep other processes from the file that a mark stands for; gives `right` where it has been found right,
        `busy` where another one is at it, else `unknown`."""
        if self._descriptor is None:
            yield "unknown"
            return
        place = _place(mark)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _MARK_BYTES, place)
        except (BlockingIOError, PermissionError):  # systems say one or the other
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
        """Note that a file has been found right."""
        if self._descriptor is not None:
            with suppress(OSError):  # without it the file is read again
                os.pwrite(self._descriptor, mark, _place(mark))


def _place(mark: bytes) -> int:
    return int.from_bytes(mark[:8], "little") % _PLACES * _MARK_BYTES

"""Copies of a remote store's files in a local folder of bounded size, which the processes of a machine share.

- A file is written under a hidden name and gets its own by a rename, after its SHA-256 was found right. So whatever has
  the right name is whole, and a download that was cut short never counts.
- One process at a time brings a file; the others wait for it (`flock` on a file of its own under `.remote/locks`).
- Room is made and reserved under one lock for the folder: what has not been used for the longest goes first.
- A mapped file keeps a shared lock for as long as it is mapped, by whichever process, and is never removed. Each
  process lets go of what it used longest ago before it maps more than its share, so that there is something to remove.

Locks end with the process that holds them, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.console import notice, warning
from headway.core.errors import DataError, fix_for
from headway.core.faults import fault_point
from headway.core.files import sha256_bytes
from headway.core.format import format_seconds
from headway.core.object_storage import scheme_of
from headway.data.reading import remote

#: Folder of a store's copies for what belongs to keeping them.
KEEPING = ".remote"
#: Seconds for which a download is tried again while the remote store cannot be reached, unless the caller says.
PATIENCE_SECONDS = 240.0
_LONGEST_WAIT_SECONDS = 30.0
#: Files brought at a time.
_AT_A_TIME = 8
# Each mapped file holds a descriptor, of which a process has 1,024 by default.
_MAPPED = 256
_BLOCK = 2**20
_PART = ".part"
# Seconds before each look for something to remove; all of it is passed by only when it is in use for so long.
_MAKING_ROOM = (0.0, 0.001, 0.01, 0.1)


@dataclass(frozen=True)
class RemotePart:
    """A file of a remote store."""

    name: str
    """Relative to the store, with forward slashes."""
    bytes: int
    sha256: str


class WrongContentError(DataError):
    """What came is not what the manifest says."""


class Copies:
    """The copies of one remote store.

    Args:
        url: The remote store.
        options: What `fsspec` needs to reach it.
        folder: Where copies lie, as in the store itself.
        limit: Bytes that they take at most.
        processes: Processes of this machine that use the folder.
        patience_seconds: For how long a download is tried again; `PATIENCE_SECONDS` when not given.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        folder: Path,
        limit: int,
        processes: int,
        patience_seconds: float | None = None,
    ) -> None:
        self.url, self.options, self.folder = url.rstrip("/"), options, folder
        self.web = scheme_of(url) in ("http", "https")
        self._limit, self._share = limit, limit // processes
        self._patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self._mapped: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._guard = threading.Lock()
        self._warned = self._away = False

    def url_of(self, name: str) -> str:
        """Where a file lies remotely; a web address may have a query, which every file gets."""
        place, question, query = self.url.partition("?") if self.web else (self.url, "", "")
        return f"{place.rstrip('/')}/{name}{question}{query}"

    def has(self, part: RemotePart) -> bool:
        """Whether there is a copy."""
        try:
            return (self.folder / part.name).stat().st_size == part.bytes
        except OSError:
            return False

    def map(self, part: RemotePart, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A file as an array over a mapping, brought if need be. As long as the array lives, the copy stays.

        Raises:
            DataError: it cannot be brought.
        """
        with self._guard:
            array = self._mapped.get(part.name)
            if array is not None:
                self._mapped.move_to_end(part.name)
                return array
        with self._opened(part) as file:
            # The mapping duplicates the descriptor, and with it keeps the lock. A plain array over it: slices of
            # `np.memmap` itself cost microseconds each.
            array = np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(part.bytes // dtype.itemsize,)))
        with self._guard:
            self._mapped[part.name] = array
        self._let_go(self._share)
        return array

    def read(self, part: RemotePart) -> bytes:
        """A file's content, brought if need be.

        Raises:
            DataError: it cannot be brought.
        """
        with self._opened(part) as file:
            return file.read()

    def bring(self, parts: Sequence[RemotePart]) -> None:
        """Bring what is missing of some files, several at a time; as many as this process may keep.

        Raises:
            DataError: one cannot be brought.
        """
        missing, total = [], 0
        for part in parts:
            if part.name not in self._mapped and not self.has(part):
                total += part.bytes
                if total > self._share:
                    break
                missing.append(part)
        if len(missing) < 2:  # is brought when it is read
            return
        self._let_go(self._share - sum(part.bytes for part in missing))
        with ThreadPoolExecutor(_AT_A_TIME, "headway-bring") as pool:
            list(pool.map(self._bring, missing))

    @contextmanager
    def _opened(self, part: RemotePart) -> Iterator[IO[bytes]]:
        """A whole copy, open and locked against removal."""
        # Before, not after: what is held for a moment too long is what another process has no room for.
        self._let_go(self._share - part.bytes)
        file = self._open(part)
        while file is None:
            self._bring(part)
            file = self._open(part)
        with file:
            yield file

    def _open(self, part: RemotePart) -> IO[bytes] | None:
        """A copy that is there and stays as long as it is open; None when there is none, or it is about to go."""
        path = self.folder / part.name
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = os.fstat(file.fileno())
            if found.st_size == part.bytes and os.path.samestat(found, path.stat()):
                _touch(path)
                return file
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _let_go(self, most: int) -> None:
        """Unmap what was used longest ago until no more than so many bytes are mapped, nor too many files."""
        with self._guard:
            mapped = sum(array.nbytes for array in self._mapped.values())
            while self._mapped and (mapped > most or len(self._mapped) > _MAPPED):
                name, array = self._mapped.popitem(last=False)
                mapped -= array.nbytes
                _touch(self.folder / name)

    def _bring(self, part: RemotePart) -> None:
        """Download a file, unless another process has done so meanwhile."""
        path = self.folder / part.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._lock_of(part.name)):
                if self.has(part):
                    return
                half = path.with_name(f".{path.name}{_PART}")
                with half.open("wb") as file:
                    self._reserve(part, file)
                    self.download(part, file)
                    fault_point("remote.rename")
                    file.flush()
                    os.fsync(file.fileno())
                with self._one_at_a_time():  # who counts meanwhile would find it under neither name
                    half.replace(path)
        except OSError as error:
            raise DataError(
                f"a copy of the remote store cannot be written: {error.strerror or error}",
                where=str(path),
                fix=fix_for(error, "free space there, lower data.cache_bytes, or set data.store to another disk"),
            ) from error

    def _one_at_a_time(self) -> AbstractContextManager[None]:
        return locked(self.folder / KEEPING / "lock")

    def _lock_of(self, name: str) -> Path:
        return self.folder / KEEPING / "locks" / sha256_bytes(name.encode())[:32]

    def _reserve(self, part: RemotePart, file: IO[bytes]) -> None:
        """Make room for a file, and take it by giving the file its length."""
        with self._one_at_a_time():
            # While it is looked through, others may let go of what was passed and take what comes next; so look again.
            enough = any(self._make_room(part.bytes, wait) for wait in _MAKING_ROOM)
            if not enough and not self._warned:
                self._warned = True
                warning(f"{self.folder}: copies take more than data.cache_bytes, since all of them are in use")
            file.truncate(part.bytes)

    def _make_room(self, size: int, wait_seconds: float) -> bool:
        """Remove what was used longest ago until so many bytes fit; says whether they do."""
        time.sleep(wait_seconds)
        found = [(path, path.stat()) for path in self._files()]
        total = sum(stat.st_size for _, stat in found) + size
        for path, stat in sorted(found, key=lambda item: item[1].st_mtime_ns):
            if total <= self._limit:
                break
            if self._remove(path):
                total -= stat.st_size
        return total <= self._limit

    def _files(self) -> Iterator[Path]:
        """Copies of shards and indexes, and what is on the way: `<split>/<source>/<file>`."""
        for folder in self.folder.glob("[!.]*/*/"):
            if folder.parent.name in ("train", "validation"):
                yield from folder.iterdir()

    def _remove(self, path: Path) -> bool:
        """Remove a copy that nobody uses; says whether it is gone."""
        if path.name.endswith(_PART):
            # Of a process that was killed, unless the lock says that someone is at it.
            name = path.relative_to(self.folder).with_name(path.name.removesuffix(_PART)[1:])
            target = self._lock_of(name.as_posix())
            target.touch()
        else:
            target = path
        try:
            with target.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except (BlockingIOError, FileNotFoundError):
            return not path.exists()
        return True

    def download(self, part: RemotePart, file: IO[bytes]) -> None:
        """Write a remote file into a local one, checked; patient while the store cannot be reached.

        Raises:
            WrongContentError: what comes has, twice, another SHA-256.
            DataError: it is gone, or could not be reached for as long as patience lasts.
        """
        until, wait = time.monotonic() + self._patience_seconds, 1.0
        while True:
            try:
                self._download(part, file)
            except remote.UnreachableError as error:
                if time.monotonic() + wait > until:
                    raise
                if not self._away:  # said once, not by every thread
                    self._away = True
                    warning(f"{error.what}; trying again for {format_seconds(self._patience_seconds)}: {self.url}")
            else:
                if self._away:
                    self._away = False
                    notice(f"the remote store can be reached again: {self.url}")
                return
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _download(self, part: RemotePart, file: IO[bytes]) -> None:
        url = self.url_of(part.name)
        for _ in range(2):
            file.seek(0)
            if self.digest(part, file.write) == part.sha256:
                return
        raise WrongContentError(
            "a remote file is not what the manifest says: its SHA-256 is another",
            where=url,
            fix="upload it again: headway data verify tells which files are damaged",
        )

    def digest(self, part: RemotePart, write: Callable[[bytes], object] = lambda data: None) -> str:
        """SHA-256 of a remote file in hexadecimal; its content goes to `write`.

        Raises:
            DataError: it cannot be read, or is shorter than it should be.
        """
        url, hashed = self.url_of(part.name), hashlib.sha256()
        # As a whole a file comes in one answer from the web; elsewhere it is read in parts that are tried again.
        with remote.open_remote(url, self.options, part.bytes, not self.web) as stream:
            while data := stream.read(_BLOCK):
                fault_point("remote.block")
                hashed.update(data)
                write(data)
        return hashed.hexdigest()


def _touch(path: Path) -> None:
    """Note that a copy is in use."""
    with suppress(OSError):  # it may be gone
        os.utime(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that a file stands for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

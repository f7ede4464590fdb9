"""Cache of a remote store's files in a local folder of bounded size, shared by the processes of a machine.

- A file is written under a hidden name and renamed after its SHA-256 has been verified. So a file with its final name
  is complete, and an interrupted download never counts.
- One process downloads a file while the others wait for it (`flock` on a lock file per file under `.remote/locks`).
- One lock for the folder guards eviction and reservation of space. The least recently used file is evicted first.
- A mapped file holds a shared lock as long as any process maps it, and is never evicted. Each process unmaps its least
  recently used files before it maps more than its share, so that something can be evicted.

The system releases a lock when the process that holds it ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.console import warning
from headway.core.errors import DataError, explaining_os_errors
from headway.core.files.hashes import sha256_bytes
from headway.core.process.faults import fault_point
from headway.data.shards import StoreFile
from headway.data.storage import DataStorage

#: Folder for the cache's own files, inside the folder of the copies.
KEEPING = ".remote"
#: Default seconds for which a download is retried while the remote store cannot be reached.
PATIENCE_SECONDS = 240.0
#: Parallel downloads.
_AT_A_TIME = 8
# Each mapped file holds a descriptor; the default limit is 1,024 per process.
_MAPPED = 256
_BLOCK = 2**20
_PART = ".part"
# Seconds before each attempt to evict files. The limit is exceeded only if all files stay in use that long.
_EVICTION_WAITS = (0.0, 0.001, 0.01, 0.1)


class WrongContentError(DataError):
    """A downloaded file does not match the manifest."""


class Copies:
    """The copies of one remote store.

    Args:
        url: The remote store.
        options: Storage options for `fsspec`.
        folder: Folder of the copies, laid out as in the store.
        limit: Upper limit of their bytes.
        processes: Processes of this machine that use the folder.
        patience_seconds: Seconds for which a download is retried; `PATIENCE_SECONDS` by default.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        folder: Path,
        limit: int,
        *,
        processes: int,
        patience_seconds: float | None = None,
    ) -> None:
        self.storage = DataStorage(url, options)
        self.folder = folder
        self._patient = self.storage.with_patience(PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
        self._limit = limit
        self._share = limit // processes
        self._mapped: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._guard = threading.Lock()
        self._warned = False

    def has(self, part: StoreFile) -> bool:
        """Return whether there is a copy of a file."""
        try:
            return (self.folder / part.name).stat().st_size == part.bytes
        except OSError:
            return False

    def map(self, part: StoreFile, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Map a file as an array, downloaded if need be. The copy stays as long as the array lives.

        Raises:
            DataError: the file cannot be downloaded.
        """
        with self._guard:
            array = self._mapped.get(part.name)
            if array is not None:
                self._mapped.move_to_end(part.name)
                return array
        with self._opened(part) as file:
            # The mapping duplicates the descriptor, which keeps the lock. Wrap it in a plain array: slicing `np.memmap`
            # itself costs microseconds each time.
            array = np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(part.bytes // dtype.itemsize,)))
        with self._guard:
            self._mapped[part.name] = array
        self._release(self._share)
        return array

    def read(self, part: StoreFile) -> bytes:
        """Return a file's content, downloaded if need be.

        Raises:
            DataError: the file cannot be downloaded.
        """
        with self._opened(part) as file:
            return file.read()

    def bring(self, parts: Sequence[StoreFile]) -> None:
        """Download missing files in parallel, as many as this process may keep.

        Raises:
            DataError: a file cannot be downloaded.
        """
        missing = []
        total = 0
        for part in parts:
            if part.name not in self._mapped and not self.has(part):
                total += part.bytes
                if total > self._share:
                    break
                missing.append(part)
        if len(missing) < 2:  # a single file is downloaded when it is read
            return
        self._release(self._share - sum(part.bytes for part in missing))
        with ThreadPoolExecutor(_AT_A_TIME, "headway-bring") as pool:
            list(pool.map(self._bring, missing))

    @contextmanager
    def _opened(self, part: StoreFile) -> Iterator[IO[bytes]]:
        """Open a complete copy during a block, locked against eviction; download the file if need be."""
        # Release files before, not after: files held a moment too long take space that another process needs.
        self._release(self._share - part.bytes)
        file = self._open(part)
        while file is None:
            self._bring(part)
            file = self._open(part)
        with file:
            yield file

    def _open(self, part: StoreFile) -> IO[bytes] | None:
        """Open an existing copy, which stays as long as it is open; None if there is none or it is being evicted."""
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

    def _release(self, limit: int) -> None:
        """Unmap the least recently used files until at most `limit` bytes are mapped, and not too many files."""
        with self._guard:
            mapped = sum(array.nbytes for array in self._mapped.values())
            while self._mapped and (mapped > limit or len(self._mapped) > _MAPPED):
                name, array = self._mapped.popitem(last=False)
                mapped -= array.nbytes
                _touch(self.folder / name)

    def _bring(self, part: StoreFile) -> None:
        """Download a file, unless another process has done so in the meantime."""
        path = self.folder / part.name
        with explaining_os_errors(
            DataError,
            "a copy of the remote store cannot be written",
            path,
            "free space there, lower data.cache_bytes, or set data.store to another disk",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._lock_of(part.name)):
                if self.has(part):
                    return
                half = path.with_name(f".{path.name}{_PART}")
                with half.open("wb") as file:
                    self._reserve(part, file)
                    self._download(part, file)
                    fault_point("remote.rename")
                    file.flush()
                    os.fsync(file.fileno())
                with self._folder_lock():  # during a scan for eviction the file must not vanish under both names
                    half.replace(path)

    def _folder_lock(self) -> AbstractContextManager[None]:
        return locked(self.folder / KEEPING / "lock")

    def _lock_of(self, name: str) -> Path:
        return self.folder / KEEPING / "locks" / sha256_bytes(name.encode())[:32]

    def _reserve(self, part: StoreFile, file: IO[bytes]) -> None:
        """Evict files to make room for a file, and reserve the space by giving the file its full length."""
        with self._folder_lock():
            # During a scan, other processes may release files already passed and open later ones. So scan again.
            enough = any(self._evict(part.bytes, wait) for wait in _EVICTION_WAITS)
            if not enough and not self._warned:
                self._warned = True
                warning(f"{self.folder}: copies take more than data.cache_bytes, since all of them are in use")
            file.truncate(part.bytes)

    def _evict(self, size: int, wait_seconds: float) -> bool:
        """Remove the least recently used copies until `size` more bytes fit; return whether they do."""
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
        """Yield copies of shards and indexes, and partial downloads: `<split>/<source>/<file>`."""
        for folder in self.folder.glob("[!.]*/*/"):
            if folder.parent.name in ("train", "validation"):
                yield from folder.iterdir()

    def _remove(self, path: Path) -> bool:
        """Remove a copy that no process uses; return whether it is gone."""
        if path.name.endswith(_PART):
            # A partial download of a killed process, unless the lock shows that the download is in progress.
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

    def _download(self, part: StoreFile, file: IO[bytes]) -> None:
        """Download a remote file into a local one and verify it.

        Raises:
            WrongContentError: the content had a wrong SHA-256 twice.
            DataError: the file is gone, or the store was unreachable for `patience_seconds`.
        """

        def write(data: bytes) -> None:
            fault_point("remote.block")
            file.write(data)

        for _ in range(2):
            file.seek(0)
            if self._patient.stream_to(part.name, part.bytes, write) == part.sha256:
                return
        raise WrongContentError(
            "a remote file does not match the manifest: its SHA-256 is wrong",
            where=self.storage.url_of(part.name),
            fix="upload it again; headway data verify lists the damaged files",
        )


def _touch(path: Path) -> None:
    """Mark a copy as recently used."""
    with suppress(OSError):  # it may be gone
        os.utime(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a lock file during a block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

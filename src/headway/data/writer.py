"""Writing a token store: into a folder beside it, which takes its place in the end."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from headway.core.errors import DataError
from headway.core.faults import fault_point
from headway.core.files import sync_folder
from headway.data.encode import SplitPart
from headway.data.store import INDEX, MANIFEST


class PartWriter:
    """The shards and the document index of one source in one split, written in input order.

    Args:
        folder: Where they go; made with the first token.
        shard_tokens: Every shard but the last has exactly this many tokens.
    """

    def __init__(self, folder: Path, shard_tokens: int) -> None:
        self._folder, self._shard_tokens = folder, shard_tokens
        self._shard: _HashedFile | None = None
        self._index: _HashedFile | None = None
        self._room = 0
        self._shards: list[dict[str, Any]] = []
        self._tokens = self._documents = 0

    def append(self, part: SplitPart) -> None:
        """Add documents.

        Raises:
            OSError: the disk is full, or the like.
        """
        if not len(part.tokens):
            return
        if self._index is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._index = _HashedFile(self._folder / INDEX)
            self._index.write(np.zeros(1, dtype="<u8"))
        self._index.write((self._tokens + np.cumsum(part.lengths)).astype("<u8"))
        self._documents += len(part.lengths)
        self._tokens += len(part.tokens)
        left = part.tokens
        while len(left):
            if self._room == 0:
                self._next_shard()
            assert self._shard is not None
            self._shard.write(left[: self._room])
            taken = min(self._room, len(left))
            self._room -= taken
            self._shards[-1]["tokens"] += taken
            left = left[taken:]

    def _next_shard(self) -> None:
        fault_point("data.shard")
        self._end_shard()
        name = f"{len(self._shards):05d}.bin"
        self._shard = _HashedFile(self._folder / name)
        self._shards.append({"file": name, "tokens": 0, "sha256": ""})
        self._room = self._shard_tokens

    def _end_shard(self) -> None:
        if self._shard is not None:
            self._shards[-1]["sha256"] = self._shard.close()
            self._shard = None

    def finish(self) -> dict[str, Any]:
        """Flush everything to disk; returns this part's entry in the manifest."""
        self._end_shard()
        entry = {"documents": self._documents, "tokens": self._tokens, "shards": self._shards}
        if self._index is not None:
            entry["index_sha256"] = self._index.close()
            sync_folder(self._folder)
        return entry


class _HashedFile:
    """A new file whose SHA-256 is known when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, values: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._file.write(data)
        self._hash.update(data)

    def close(self) -> str:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()


@contextmanager
def building(store: Path) -> Iterator[Path]:
    """An empty folder beside the store to build a new one in, for this process alone.

    What a killed preparation left there is cleared first, and a store that a kill took away in the middle of `publish`
    is put back. Unless it was published, the folder is gone when the block ends.

    Raises:
        DataError: another process is preparing this store right now, or the folder cannot be made.
    """
    folder = store.with_name(f".{store.name}.preparing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot write here: {error.strerror}", where=str(folder), fix="set data.store") from None
    try:
        _lock(folder, descriptor, store)
        try:
            if not store.exists() and _replaced(store).exists():
                _replaced(store).rename(store)
            _clear(folder)
            yield folder
        finally:
            # Still here: nothing was published.
            if _is_at(folder, descriptor):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(folder: Path, descriptor: int, store: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise _busy(store) from None
    # The one before us may have moved the folder into place between our open and our lock.
    if not _is_at(folder, descriptor):
        raise _busy(store)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _busy(store: Path) -> DataError:
    return DataError(
        "another process is preparing this store", where=str(store), fix="wait until it is done, or set data.store"
    )


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _replaced(store: Path) -> Path:
    return store.with_name(f".{store.name}.replaced")


def publish(folder: Path, store: Path) -> None:
    """Put a finished folder in the store's place. A folder cannot be renamed over another, so the old one steps aside
    first; should a kill fall between the two renames, `building` puts it back.

    Raises:
        DataError: what is in the store's place is not a token store.
    """
    sync_folder(folder)
    old = _replaced(store)
    shutil.rmtree(old, ignore_errors=True)
    if store.exists():
        refuse_foreign(store)
        store.rename(old)
    fault_point("data.publish")
    folder.rename(store)
    sync_folder(store.parent)
    shutil.rmtree(old, ignore_errors=True)


def refuse_foreign(store: Path) -> None:
    """Raise a DataError when the store's place is taken by something that must not be deleted."""
    if store.exists() and not (store.is_dir() and ((store / MANIFEST).exists() or not any(store.iterdir()))):
        raise DataError(
            "the store's place is taken by something that is no token store",
            where=str(store),
            fix="set data.store to another folder, or move that one away",
        )

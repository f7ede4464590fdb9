"""Bounded memory for work on any number of rows: tables, partitions and spools that go to scratch files when they grow.

A row is some 64-bit numbers, the first of which is its key; rows come in arrays uint64 (n, width).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

# Rows or documents read at a time.
BLOCK = 1 << 15
# What a row of two numbers takes with the copies that sorting makes of it.
_ROW_BYTES = 128
_PREFIX = "headway-dedup-"

Kind = TypeVar("Kind", bound=np.generic)
Rows = NDArray[np.uint64]
#: Called with how many rows are done, and how many there are.
Told = Callable[[int, int], None]


class Workspace:
    """What does not fit into the bound lies in scratch files, which are gone when the workspace is closed.

    Args:
        memory_bytes: Bound on the arrays in memory, half for tables, half for rows that are being sorted.
        folder: Where scratch files lie; the system's temporary folder when None.
    """

    def __init__(self, memory_bytes: int, folder: Path | None = None) -> None:
        self.memory_bytes, self._folder = memory_bytes, folder
        self._tables_left = memory_bytes // 2
        self._files = ExitStack()

    @property
    def rows(self) -> int:
        """Rows of two numbers that may be sorted at a time."""
        return max(1024, self.memory_bytes // 2 // _ROW_BYTES)

    def table(self, count: int, dtype: type[Kind]) -> NDArray[Kind]:
        """An array of zeros (count,), in memory or in a scratch file."""
        size = count * np.dtype(dtype).itemsize
        if size <= self._tables_left:
            self._tables_left -= size
            return np.zeros(count, dtype=dtype)
        file = self.file()
        self._files.enter_context(file)
        file.truncate(size)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(count,))

    def file(self) -> IO[bytes]:
        """A scratch file without a name."""
        return tempfile.TemporaryFile(prefix=_PREFIX, dir=self._folder)

    def spool(self) -> Spool:
        """A place for rows that a later round goes through."""
        return Spool(4 * self.rows, self._folder)

    def partition(
        self, blocks: Callable[[], Iterator[Rows]], count: int, width: int = 2, progress: Told | None = None
    ) -> Partition:
        """Rows by ranges of keys, each of which fits into memory with room to spare when keys are spread evenly.

        Args:
            blocks: Goes through all rows, the same ones each time.
            count: How many rows there are, at most.
            width: Numbers in a row.
            progress: Told how far it is, if every range is read once.
        """
        return Partition(self, blocks, max(1, -(-count * width // self.rows)), width, count, progress)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()


class Partition:
    """Rows by ranges of keys. A single range is not copied; more are written to a scratch file, each in one piece."""

    def __init__(
        self,
        workspace: Workspace,
        blocks: Callable[[], Iterator[Rows]],
        parts: int,
        width: int,
        count: int,
        progress: Told | None,
    ) -> None:
        self.parts = parts
        self._blocks, self._width = blocks, width
        # Rows of several ranges are gone through three times: to count them, to write them, and to read them.
        self._progress, self._rounds, self._seen, self._count = progress, 3 if parts > 1 else 1, 0, count
        self._file: IO[bytes] | None = None
        self._tell(0)
        if parts > 1:
            sizes = np.zeros(parts, dtype=np.int64)
            for rows in self._counted(blocks()):
                sizes += np.bincount(_part_of(rows[:, 0], parts), minlength=parts)
            self._count = int(sizes.sum())  # it may be fewer than was thought
            self._starts = np.cumsum([0, *sizes])
            self._file = workspace.file()
            self._write(self._file)

    def _counted(self, blocks: Iterator[Rows]) -> Iterator[Rows]:
        """The same rows, which are told when they have been worked on."""
        for rows in blocks:
            yield rows
            self._tell(len(rows))

    def _tell(self, rows: int) -> None:
        self._seen += rows
        if self._progress:
            self._progress(self._seen // self._rounds, self._count)

    def _write(self, file: IO[bytes]) -> None:
        written = self._starts[:-1].copy()
        for rows in self._counted(self._blocks()):
            if not len(rows):
                continue
            part = _part_of(rows[:, 0], self.parts)
            order = np.argsort(part, kind="stable")
            found, begin = np.unique(part[order], return_index=True)
            for number, some in zip(found.tolist(), np.split(rows[order], begin[1:]), strict=True):
                file.seek(int(written[number]) * 8 * self._width)
                file.write(some.tobytes())
                written[number] += len(some)
        file.flush()

    def read(self, part: int) -> Iterator[Rows]:
        """The rows of a range, in the order in which they came, some at a time."""
        yield from self._counted(self._rows_of(part))

    def _rows_of(self, part: int) -> Iterator[Rows]:
        if self._file is None:
            yield from self._blocks()
            return
        row = 8 * self._width
        for first in range(int(self._starts[part]), int(self._starts[part + 1]), BLOCK):
            count = min(BLOCK, int(self._starts[part + 1]) - first)
            self._file.seek(first * row)
            yield np.frombuffer(self._file.read(count * row), dtype=np.uint64).reshape(-1, self._width)

    def __enter__(self) -> Partition:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


class Spool:
    """Rows of two numbers in the order in which they came; in memory while they are few, else in a scratch file."""

    def __init__(self, memory_bytes: int, folder: Path | None) -> None:
        where = None if folder is None else str(folder)
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes, prefix=_PREFIX, dir=where)  # noqa: SIM115

    def add(self, rows: Rows) -> None:
        """Append rows."""
        if len(rows):
            self._file.write(rows.tobytes())

    def read(self) -> Iterator[Rows]:
        """All rows, some at a time."""
        self._file.seek(0)
        while data := self._file.read(16 * BLOCK):
            yield np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)

    def close(self) -> None:
        """Let go of memory and file."""
        self._file.close()


def make_rows(*columns: NDArray[Any]) -> Rows:
    """Rows from their columns, whose values are not negative."""
    return np.stack([column.astype(np.uint64, copy=False) for column in columns], axis=1)


def thinned(blocks: Iterable[Rows], limit: int, thin: Callable[[Rows], Rows], width: int = 2) -> Rows:
    """Gather rows, and thin them whenever there are more than `limit`; at last those that are left after thinning."""
    gathered, size = [np.zeros((0, width), dtype=np.uint64)], 0
    for rows in blocks:
        gathered.append(rows)
        size += len(rows)
        if size > limit:
            gathered = [thin(np.concatenate(gathered))]
            size = len(gathered[0])
    return thin(np.concatenate(gathered))


def _part_of(keys: NDArray[np.uint64], parts: int) -> NDArray[np.int64]:
    """Which of `parts` equal ranges each key falls into."""
    return (((keys >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32)).astype(np.int64)


def group_starts(sorted_keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Where a group of equal keys begins, in keys (n,) or (n, columns) that are sorted."""
    starts = np.ones(len(sorted_keys), dtype=bool)
    different = sorted_keys[1:] != sorted_keys[:-1]
    starts[1:] = different.any(axis=1) if different.ndim == 2 else different
    return starts

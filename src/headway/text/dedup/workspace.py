"""Bounded memory for any number of rows: tables, partitions and spools that move to scratch files when they grow.

A row is a tuple of 64-bit numbers, the first of which is its key. Rows are stored in arrays uint64 (n, width).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints, UInt64s

# Rows or documents read at a time.
BLOCK = 1 << 15
# Bytes of a row of two numbers, with the copies that sorting makes.
_ROW_BYTES = 128
_PREFIX = "headway-dedup-"

Kind = TypeVar("Kind", bound=np.generic)
Rows = UInt64s
#: Called with the number of rows done and in total.
RowProgress = Callable[[int, int], None]


class Workspace:
    """Arrays within a memory limit. Larger ones lie in scratch files, which are removed with the workspace.

    Args:
        memory_bytes: Limit of the arrays in memory, half for tables, half for rows being sorted.
        folder: Folder of the scratch files; the system's temporary folder if None.
    """

    def __init__(self, memory_bytes: int, folder: Path | None) -> None:
        self.memory_bytes = memory_bytes
        self._folder = folder
        self._tables_left = memory_bytes // 2
        self._files = ExitStack()

    @property
    def rows(self) -> int:
        """Limit of the rows of two numbers sorted at a time."""
        return max(1024, self.memory_bytes // 2 // _ROW_BYTES)

    def table(self, count: int, dtype: type[Kind]) -> NDArray[Kind]:
        """Return an array of zeros (count,), in memory or in a scratch file."""
        size = count * np.dtype(dtype).itemsize
        if size <= self._tables_left:
            self._tables_left -= size
            return np.zeros(count, dtype=dtype)
        file = self.file()
        self._files.enter_context(file)
        file.truncate(size)
        return np.memmap(file, dtype=dtype, mode="r+", shape=(count,))

    def file(self) -> IO[bytes]:
        """Create a scratch file without a name."""
        return tempfile.TemporaryFile(prefix=_PREFIX, dir=self._folder)

    def spool(self) -> Spool:
        """Create a spool for rows that a later round reads."""
        return Spool(4 * self.rows, self._folder)

    def partition(
        self, blocks: Callable[[], Iterator[Rows]], count: int, width: int = 2, progress: RowProgress | None = None
    ) -> Partition:
        """Partition rows by ranges of keys; each range fits easily into memory if keys are uniformly distributed.

        Args:
            blocks: Iterates over all rows, the same ones each time.
            count: Upper limit of the number of rows.
            width: Numbers in a row.
            progress: Called as work advances; correct if every range is read once.
        """
        parts = max(1, -(-count * width // self.rows))
        return Partition(self, blocks, parts=parts, width=width, count=count, progress=progress)

    def thin(
        self,
        blocks: Callable[[], Iterator[Rows]],
        count: int,
        width: int,
        thin: Callable[[Rows], Rows],
        progress: RowProgress,
    ) -> None:
        """Thin rows as `thinned` does, range by range of keys; the arguments are those of `partition` and `thinned`."""
        with self.partition(blocks, count, width, progress) as partition:
            for part in range(partition.parts):
                thinned(partition.read(part), self.rows, thin, width)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()


class Partition:
    """Rows by ranges of keys. A single range is not copied; several are written to a scratch file one by one."""

    def __init__(
        self,
        workspace: Workspace,
        blocks: Callable[[], Iterator[Rows]],
        *,
        parts: int,
        width: int,
        count: int,
        progress: RowProgress | None,
    ) -> None:
        self.parts = parts
        self._blocks = blocks
        self._width = width
        # With several ranges there are three passes over the rows: to count, to write and to read them.
        self._progress = progress
        self._rounds = 3 if parts > 1 else 1
        self._seen = 0
        self._count = count
        self._file: IO[bytes] | None = None
        self._report(0)
        if parts > 1:
            sizes = np.zeros(parts, dtype=np.int64)
            for rows in self._counted(blocks()):
                sizes += np.bincount(_part_of(rows[:, 0], parts), minlength=parts)
            self._count = int(sizes.sum())  # it may be below the limit
            self._starts = np.cumsum([0, *sizes])
            self._file = workspace.file()
            self._write(self._file)

    def _counted(self, blocks: Iterator[Rows]) -> Iterator[Rows]:
        """Yield the same rows, and report each block after it was processed."""
        for rows in blocks:
            yield rows
            self._report(len(rows))

    def _report(self, rows: int) -> None:
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
        """Yield the rows of a range in blocks, in their original order."""
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
    """Rows of two numbers in insertion order, in memory while they are few, else in a scratch file."""

    def __init__(self, memory_bytes: int, folder: Path | None) -> None:
        where = None if folder is None else str(folder)
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes, prefix=_PREFIX, dir=where)  # noqa: SIM115

    def add(self, rows: Rows) -> None:
        """Append rows."""
        if len(rows):
            self._file.write(rows.tobytes())

    def read(self) -> Iterator[Rows]:
        """Yield all rows in blocks."""
        self._file.seek(0)
        while data := self._file.read(16 * BLOCK):
            yield np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)

    def close(self) -> None:
        """Release memory and file."""
        self._file.close()


def make_rows(*columns: NDArray[Any]) -> Rows:
    """Build rows from columns of non-negative values."""
    return np.stack([column.astype(np.uint64, copy=False) for column in columns], axis=1)


def thinned(blocks: Iterable[Rows], limit: int, thin: Callable[[Rows], Rows], width: int = 2) -> Rows:
    """Gather rows, thin them whenever there are more than `limit`, and return the rows left after a last thinning."""
    gathered = [np.zeros((0, width), dtype=np.uint64)]
    size = 0
    for rows in blocks:
        gathered.append(rows)
        size += len(rows)
        if size > limit:
            gathered = [thin(np.concatenate(gathered))]
            size = len(gathered[0])
    return thin(np.concatenate(gathered))


def _part_of(keys: UInt64s, parts: int) -> Ints:
    """Return the number of the range, out of `parts` equal ones, of each key."""
    return (((keys >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32)).astype(np.int64)


def group_starts(sorted_keys: NDArray[Any]) -> Bools:
    """Return where groups of equal keys begin, bool (n,), in sorted keys (n,) or (n, columns)."""
    starts = np.ones(len(sorted_keys), dtype=bool)
    different = sorted_keys[1:] != sorted_keys[:-1]
    starts[1:] = different.any(axis=1) if different.ndim == 2 else different
    return starts

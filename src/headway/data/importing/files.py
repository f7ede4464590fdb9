"""Files of token ids as other projects write them: what all formats have in common, and reading them block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.foreign import open_regular

#: Tokens read at a time.
BLOCK_TOKENS = 2**21
#: Documents whose ends are looked at at a time.
BLOCK_DOCUMENTS = 2**18

Ends = Iterator[NDArray[np.int64]]
#: Where a block's documents end is known from an index, or is found by the token that separates them.
FindEnds = Callable[[], Ends]


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    path: Path
    dtype: np.dtype[Any]
    """Of the ids in the file: little-endian integers."""
    first_byte: int
    """Where ids begin."""
    tokens: int
    ends: FindEnds | None = None
    """Where documents end, in tokens, ascending, in blocks; None when only the token between them tells."""
    goes_on: bool = False
    """The last document may go on in the next file."""
    beside: tuple[Path, ...] = ()
    """Files that belong to it: its index, ..."""
    tokenizer: str | None = None
    """The tokenizer that it says it was written with: a name or a path."""

    @property
    def bytes(self) -> int:
        """Length of the file."""
        return self.first_byte + self.tokens * self.dtype.itemsize


@dataclass(frozen=True)
class ImportSource:
    """What becomes one source of the store."""

    name: str
    train: tuple[TokenFile, ...]
    validation: tuple[TokenFile, ...] = ()
    weight: float | None = None
    """Its share in a blend."""

    @property
    def splits(self) -> dict[str, tuple[TokenFile, ...]]:
        """Files by split."""
        return {"train": self.train, "validation": self.validation}


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive ids of a file, and where documents end among them."""

    ids: NDArray[Any]
    """As the file has them, all within the vocabulary, (n,)."""
    ends: NDArray[np.int64]
    """Places in `ids` before which a document ends, ascending, from 0 to n; equal ones are empty documents."""


def read_blocks(
    file: TokenFile, vocab_size: int, separator: int, hashed: Any, advance: Callable[[int], None]
) -> Iterator[TokenBlock]:
    """The ids of a file in order.

    Args:
        file: Which.
        vocab_size: Every id must be below it.
        separator: The token that ends a document, for files without an index.
        hashed: A hash object that takes in all bytes of the file.
        advance: Told how many bytes were read.

    Raises:
        DataError: the file cannot be read, is shorter than it was, or has an id that the vocabulary lacks.
    """
    ends = _EndsUpTo(file.ends()) if file.ends is not None else None
    for start, ids in _ids(file, hashed, advance):
        _check(ids, start, file, vocab_size)
        if ends is not None:
            yield TokenBlock(ids, ends.take(start + len(ids)) - start)
        else:
            yield TokenBlock(ids, np.flatnonzero(ids == separator) + 1)


def _ids(file: TokenFile, hashed: Any, advance: Callable[[int], None]) -> Iterator[tuple[int, NDArray[Any]]]:
    try:
        with open_regular(file.path, buffering=0) as opened:
            hashed.update(_exactly(opened, file.first_byte, file))
            for start in range(0, file.tokens, BLOCK_TOKENS):
                count = min(BLOCK_TOKENS, file.tokens - start)
                data = _exactly(opened, count * file.dtype.itemsize, file)
                hashed.update(data)
                yield start, np.frombuffer(data, dtype=file.dtype)
                advance(len(data))
    except OSError as error:
        raise unreadable(file.path, error) from None


def _exactly(opened: Any, count: int, file: TokenFile) -> bytearray:
    """The next bytes of an unbuffered file, all of them."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = opened.readinto(view[done:])
        if not got:
            raise DataError(
                "the file is shorter than it was a moment ago",
                where=str(file.path),
                fix="import it when nothing writes it any more",
            )
        done += got
    return data


def _check(ids: NDArray[Any], start: int, file: TokenFile, vocab_size: int) -> None:
    """Refuse ids that the vocabulary lacks."""
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < vocab_size:
        return
    place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise DataError(
        f"token {start + place:,} of the file is {int(ids[place]):,}, but the vocabulary ends at {vocab_size - 1:,}",
        where=f"{file.path}, byte {file.first_byte + (start + place) * file.dtype.itemsize:,}",
        fix="give the tokenizer that wrote the file (--tokenizer); if it was that one, the file is damaged",
    )


class _EndsUpTo:
    """Ends of documents, handed out as far as ids have been read."""

    def __init__(self, blocks: Ends) -> None:
        self._blocks, self._left = blocks, np.empty(0, dtype=np.int64)

    def take(self, end: int) -> NDArray[np.int64]:
        """Those that are not above `end` and have not been taken before."""
        found = []
        while True:
            count = int(np.searchsorted(self._left, end, side="right"))
            found.append(self._left[:count])
            self._left = self._left[count:]
            if len(self._left):
                break
            following = next(self._blocks, None)
            if following is None:
                break
            self._left = following
        return np.concatenate(found)


def size_of(path: Path) -> int:
    """Length of a file.

    Raises:
        DataError: it is not there, or no file that can be read.
    """
    try:
        if path.is_dir():
            raise DataError("a file is wanted here, not a folder", where=str(path), fix="name the files in it")
        with open_regular(path) as opened:
            return opened.seek(0, 2)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    return DataError(
        f"a file to import cannot be read: {error.strerror or error}", where=str(path), fix="check the paths"
    )


def damaged(path: Path, problem: str) -> DataError:
    """The error for a file that is not what its format says."""
    return DataError(
        f"the file is damaged or was cut short: {problem}", where=str(path), fix="copy it again from where it was made"
    )


def sha256() -> Any:
    """A hash object."""
    return hashlib.sha256()

"""Token files of other projects: types common to all formats, and a reader that works in blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Ints
from headway.core.errors import DataError
from headway.core.files.foreign import open_regular

#: Tokens read at a time.
BLOCK_TOKENS = 2**21
#: Document ends processed at a time.
BLOCK_DOCUMENTS = 2**18

Ends = Iterator[Ints]
#: Function that yields the ends of a file's documents in blocks.
FindEnds = Callable[[], Ends]


@dataclass(frozen=True)
class TokenFile:
    """One file of token ids."""

    path: Path
    dtype: np.dtype[Any]
    """Data type of the ids: little-endian integers."""
    first_byte: int
    """Offset of the ids."""
    tokens: int
    ends: FindEnds | None = None
    """Ends of documents, in tokens, ascending, in blocks; None if only the token between documents marks them."""
    continues: bool = False
    """Whether the last document may continue in the next file."""
    companions: tuple[Path, ...] = ()
    """Files that belong to it, such as its index."""
    tokenizer: str | None = None
    """Name or path of its tokenizer, if the file records it."""

    @property
    def bytes(self) -> int:
        """Length of the file."""
        return self.first_byte + self.tokens * self.dtype.itemsize


@dataclass(frozen=True)
class ImportSource:
    """Files that form one source of the store."""

    name: str
    train: tuple[TokenFile, ...]
    validation: tuple[TokenFile, ...] = ()
    weight: float | None = None
    """Its weight in a blend."""

    @property
    def splits(self) -> dict[str, tuple[TokenFile, ...]]:
        """Files by split."""
        return {"train": self.train, "validation": self.validation}


@dataclass(frozen=True)
class TokenBlock:
    """Consecutive ids of a file, and the ends of documents among them."""

    ids: NDArray[Any]
    """Ids of the file, (n,), all within the vocabulary."""
    ends: Ints
    """Exclusive ends of documents in `ids`, ascending, from 0 to n; equal ones mark empty documents."""


def check_not_wider(path: Path, beginning: bytes, fix: str) -> None:
    """Check that not every second id of two bytes would be 0, as in small ids of four bytes.

    No text is like that, but for a few words, where asking costs little and a wrong guess would go unnoticed.

    Args:
        path: The file.
        beginning: Its first ids; their bytes, and those of the file, are a multiple of 4.
        fix: What says which it is.

    Raises:
        DataError: every second id would be 0.
    """
    halves = np.frombuffer(beginning, dtype="<u2").reshape(-1, 2)
    if halves[:, 0].any() and not halves[:, 1].any():
        what = "the ids seem to be uint32, since the upper half of each is 0; read as uint16 they would be wrong"
        raise DataError(what, where=str(path), fix=fix)


def read_blocks(
    file: TokenFile, vocab_size: int, separator: int, hashed: Any, advance: Callable[[int], None]
) -> Iterator[TokenBlock]:
    """Yield the ids of a file in order, in blocks.

    Args:
        file: The file.
        vocab_size: Upper limit (exclusive) of the ids.
        separator: The token that ends a document, for files without an index.
        hashed: A hash object that is updated with all bytes of the file.
        advance: Called with the number of bytes read.

    Raises:
        DataError: the file cannot be read, has become shorter, or has an id outside the vocabulary.
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
    """Read exactly `count` bytes of an unbuffered file."""
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        got = opened.readinto(view[done:])
        if not got:
            raise DataError(
                "the file has become shorter during the import",
                where=str(file.path),
                fix="import it again when no process writes it",
            )
        done += got
    return data


def _check(ids: NDArray[Any], start: int, file: TokenFile, vocab_size: int) -> None:
    """Check that all ids are within the vocabulary."""
    low = int(ids.min())
    high = int(ids.max())
    if low >= 0 and high < vocab_size:
        return
    place = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
    raise DataError(
        f"token {start + place:,} of the file is {int(ids[place]):,}, but the vocabulary ends at {vocab_size - 1:,}",
        where=f"{file.path}, byte {file.first_byte + (start + place) * file.dtype.itemsize:,}",
        fix="give the tokenizer that wrote the file (--tokenizer); if it was that one, the file is damaged",
    )


class _EndsUpTo:
    """Iterator over ends of documents that returns them as far as ids have been read."""

    def __init__(self, blocks: Ends) -> None:
        self._blocks = blocks
        self._left = np.empty(0, dtype=np.int64)

    def take(self, end: int) -> Ints:
        """Return the next ends up to `end`, inclusive."""
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
    """Return the length of a file.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    try:
        if path.is_dir():
            raise DataError("expected a file, not a folder", where=str(path), fix="name the files in it")
        with open_regular(path) as opened:
            return opened.seek(0, 2)
    except OSError as error:
        raise unreadable(path, error) from None


def read_beginning(path: Path, size: int) -> bytes:
    """Read the first bytes of a file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with open_regular(path) as opened:
            return opened.read(size)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(
        f"a file to import cannot be read: {error.strerror or error}", where=str(path), fix="check the paths"
    )


def damaged(path: Path, problem: str) -> DataError:
    """Return the error for a file that violates its format."""
    return DataError(
        f"the file is damaged or truncated: {problem}", where=str(path), fix="copy it again from its origin"
    )

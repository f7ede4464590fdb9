"""What a worker reads in one go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.config.data import MAX_DOCUMENT_BYTES
from headway.core.errors import DataError
from headway.data.reading.documents import BadDocument
from headway.data.reading.places import SourceFile


@dataclass(frozen=True)
class Piece:
    """A file, a range of a large one, or some documents of a stream. Small but for the last, and picklable."""

    source: int
    """Number of the source in the config."""
    file: SourceFile
    """For a stream its name stands here, and no file."""
    field: str
    span: tuple[int, int] | None
    """Byte range (jsonl: the lines that begin in it; Arrow streams: their messages), range of row groups (Parquet) or
    of record batches (Arrow files); the whole file when None."""
    bytes: int
    """Its share of the file's bytes, for progress."""
    template: str | None = None
    """Makes the text, instead of `field`."""
    texts: Iterable[str] | None = None
    """Documents of a stream."""
    bad: tuple[BadDocument, ...] = ()
    """What of a stream was malformed."""
    empty: tuple[tuple[int, int], ...] = ()
    """Documents of a stream without any text: texts before them, and how many they are."""
    problem: DataError | None = None
    """Why nothing of it can be read, for whoever comes to it."""
    most: int = MAX_DOCUMENT_BYTES
    """Bytes that a record of it may have (`data.max_document_bytes`)."""


@dataclass(frozen=True)
class StoredTexts:
    """Documents of a stream that will be read again, in a file until then."""

    path: Path
    start: int
    end: int
    """Where they are in it, in bytes."""

    @classmethod
    def append(cls, path: Path, texts: Iterable[str]) -> StoredTexts:
        """Add texts to a file.

        Raises:
            OSError: it cannot be written.
        """
        with path.open("ab") as file:
            start = file.tell()
            return cls(path, start, start + file.write(json.dumps(list(texts)).encode()))

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            yield from json.loads(file.read(self.end - self.start))

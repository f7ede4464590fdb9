"""Pieces: the units of input that a worker reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.config.sections.data import MAX_DOCUMENT_BYTES
from headway.core.errors import DataError
from headway.text.reading.documents import BadDocument
from headway.text.reading.places import SourceFile


@dataclass(frozen=True)
class Piece:
    """A file, a range of a large file, or some documents of a stream. It is picklable, and small unless a stream."""

    source: int
    """Number of the source in the config."""
    file: SourceFile
    """For a stream, a placeholder that carries its name."""
    field: str
    span: tuple[int, int] | None
    """Byte range (JSON Lines: the lines that begin in it; Arrow streams: their messages), range of row groups (Parquet)
    or of record batches (Arrow files); None for the whole file."""
    bytes: int
    """Its share of the file's bytes, for progress."""
    template: str | None = None
    """Template of the text, instead of `field`."""
    texts: Iterable[str] | None = None
    """Documents of a stream."""
    bad: tuple[BadDocument, ...] = ()
    """Malformed documents of a stream."""
    empty: tuple[tuple[int, int], ...] = ()
    """Documents of a stream without text, as pairs: number of texts before them, and their count."""
    problem: DataError | None = None
    """Error to raise when the piece is read."""
    most: int = MAX_DOCUMENT_BYTES
    """Size limit of a record in bytes (`data.max_document_bytes`)."""


@dataclass(frozen=True)
class StoredTexts:
    """Documents of a stream, stored in a file until they are read again."""

    path: Path
    start: int
    end: int
    """They are the bytes [start, end) of the file."""

    @classmethod
    def append(cls, path: Path, texts: Iterable[str]) -> StoredTexts:
        """Append texts to a file, and return their range in it.

        Raises:
            OSError: the file cannot be written.
        """
        with path.open("ab") as file:
            start = file.tell()
            return cls(path, start, start + file.write(json.dumps(list(texts)).encode()))

    def __iter__(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            file.seek(self.start)
            yield from json.loads(file.read(self.end - self.start))

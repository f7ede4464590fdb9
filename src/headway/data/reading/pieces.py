"""What a worker reads in one go."""

from __future__ import annotations

from dataclasses import dataclass

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
    texts: tuple[str, ...] | None = None
    """Documents of a stream."""
    bad: tuple[BadDocument, ...] = ()
    """What of a stream was malformed."""
    empty: int = 0
    """Documents of a stream without any text."""

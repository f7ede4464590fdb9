"""Units: the runs of input that a store is made of, each of which is processed once and kept.

A unit is a span of a large file, or some small files in a row. Where units end depends on each file alone, so that
adding, changing or removing a file leaves all units but those around it as they were: a file ends a unit when a hash of
its name, as a fraction, is below its size over the length that units should have (content-defined chunking,
Muthitacharoen et al. 2001, section 3.1, with files in place of bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from headway.data.reading.pieces import StoredTexts
from headway.data.reading.sources import Piece, Source, SourceFile, pieces_of

# However unlucky the names are, a unit ends at so many times the length that it should have.
_LONGEST = 4


@dataclass(frozen=True)
class Unit:
    """A run of pieces of one source."""

    source: int
    """Number of the source in the config."""
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Its share of the input's bytes, for progress."""
        return sum(piece.bytes for piece in self.pieces)

    def without_texts(self, store: Path | None = None) -> Unit:
        """The same when it has been read: documents of a stream would stay in memory for as long as it is known.

        Args:
            store: A file that they are added to, since they will be read again.

        Raises:
            OSError: it cannot be written.
        """

        def stored(texts: Iterable[str] | None) -> Iterable[str] | None:
            if texts is None or store is None:
                return texts and ()
            return StoredTexts.append(store, texts)

        return Unit(self.source, tuple(replace(p, texts=stored(p.texts), bad=()) for p in self.pieces))


def units_of(number: int, source: Source, length: int) -> Iterator[Unit]:
    """The units of a source, which is number `number` in the config, in input order; each has about `length` bytes.

    Raises:
        ConfigError, DataError: as `pieces_of`.
    """
    pieces: list[Piece] = []
    size = 0
    for file, in_file in groupby(pieces_of([source]), key=lambda piece: piece.file):
        before = offset = 0
        for piece in in_file:
            if pieces and (_crosses(before, offset, length) or size >= _LONGEST * length):
                yield Unit(number, tuple(pieces))
                pieces, size = [], 0
            pieces.append(piece)
            size, before, offset = size + piece.bytes, offset, offset + piece.bytes
        if _ends_unit(file, length):
            yield Unit(number, tuple(pieces))
            pieces, size = [], 0
    if pieces:
        yield Unit(number, tuple(pieces))


def _crosses(before: int, offset: int, length: int) -> bool:
    """Whether a multiple of `length` lies in (before, offset]: the piece that begins at `offset` begins a unit."""
    return offset // length > before // length


def _ends_unit(file: SourceFile, length: int) -> bool:
    digest = hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") * length < file.bytes * 2**64

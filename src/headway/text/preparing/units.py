"""Units: the stretches of input that a store is made of. Each is processed once, and its result is cached.

A unit is a span of a large file, or a sequence of small files. Each file alone determines whether a unit ends there, so
adding, changing or removing a file affects only the units around it. A file ends a unit if a hash of its name, as a
fraction, is below its size divided by the target length of units (content-defined chunking, Muthitacharoen et al. 2001,
section 3.1, with files in place of bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from headway.text.reading.pieces import StoredTexts
from headway.text.reading.sources import Piece, Source, pieces_of

# A unit ends at this multiple of the target length, whatever the hashes of the names are.
_LONGEST = 4


@dataclass(frozen=True)
class Unit:
    """Consecutive pieces of one source."""

    source: int
    """Number of the source in the config."""
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Its share of the input's bytes, for progress."""
        return sum(piece.bytes for piece in self.pieces)

    def without_texts(self, store: Path | None) -> Unit:
        """Return the unit without the documents of a stream, which would otherwise stay in memory.

        Args:
            store: A file to append the documents to, if they will be read again.

        Raises:
            OSError: The file cannot be written.
        """

        def stored(texts: Iterable[str] | None) -> Iterable[str] | None:
            if texts is None or store is None:
                return texts and ()
            return StoredTexts.append(store, texts)

        return Unit(self.source, tuple(replace(p, texts=stored(p.texts), bad=()) for p in self.pieces))


def units_of(number: int, source: Source, length: int) -> Iterator[Unit]:
    """Yield the units of a source in input order, each of about `length` bytes.

    Args:
        number: Number of the source in the config.
        source: The source.
        length: Target length of a unit in bytes.

    Raises:
        ConfigError, DataError: As in `pieces_of`.
    """
    pieces: list[Piece] = []
    size = 0
    for file, in_file in groupby(pieces_of([source]), key=lambda piece: piece.file):
        before = offset = 0
        for piece in in_file:
            # A piece begins a unit where a multiple of `length` lies in (before, offset].
            if pieces and (offset // length > before // length or size >= _LONGEST * length):
                yield Unit(number, tuple(pieces))
                pieces = []
                size = 0
            pieces.append(replace(piece, source=number))
            size = size + piece.bytes
            before = offset
            offset = offset + piece.bytes
        digest = hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).digest()
        if int.from_bytes(digest[:8], "big") * length < file.bytes * 2**64:
            yield Unit(number, tuple(pieces))
            pieces = []
            size = 0
    if pieces:
        yield Unit(number, tuple(pieces))

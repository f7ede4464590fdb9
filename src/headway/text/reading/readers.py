"""Reader of a piece: yields batches of texts. Malformed documents are reported with their place, not raised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from headway.core.errors import DataError
from headway.core.format import format_bytes
from headway.text.reading.arrow_files import read_arrow
from headway.text.reading.compression import is_damage, open_content
from headway.text.reading.csv_rows import csv_documents
from headway.text.reading.documents import BadDocument, Batch, batched
from headway.text.reading.json_lines import BOM, damaged, not_utf8, read_json_lines
from headway.text.reading.pieces import Piece
from headway.text.reading.places import unreadable
from headway.text.reading.tables import read_parquet

_BLOCK = 2**20
# Largest allowed compression ratio of a text file: twice what the best methods reach with plain text.
_UNPACKED = 32


def read_batches(piece: Piece) -> Iterator[Batch]:
    """Yield the documents of a piece in input order, in batches of about a mebibyte of text.

    Raises:
        ConfigError: the file needs an extra that is not installed.
        DataError: a table lacks the column (a mistake in the config, not in a document); or the file cannot be read, is
            gone, or (a remote one) has changed since it was listed.
    """
    file = piece.file
    if piece.problem is not None:
        raise piece.problem
    try:
        if piece.texts is not None:
            yield Batch(list(piece.texts), list(piece.bad), Counter(dict(piece.empty)))
        elif file.format == "jsonl":
            yield from read_json_lines(piece)
        elif file.format == "parquet":
            yield from read_parquet(piece)
        elif file.format == "arrow":
            yield from read_arrow(piece)
        elif file.format == "csv":
            yield from batched(csv_documents(piece))
        else:
            yield _read_text(piece)
    except OSError as error:
        raise unreadable(file.location, error) from error
    except MemoryError:
        raise DataError(
            "there is not enough memory to read this file",
            where=file.location,
            fix="use fewer workers, or lower data.max_document_bytes",
        ) from None


def _read_text(piece: Piece) -> Batch:
    """Read a text file as one document of any size; a compressed file only up to a plausible ratio."""
    batch = Batch([])
    file = piece.file
    most = max(piece.most, _UNPACKED * file.bytes) if file.compression else math.inf
    try:
        with open_content(file) as stream:
            data = _up_to(stream, most)
        if len(data) > most:
            more = f"more than {format_bytes(len(data))}, which is over {_UNPACKED} times its size"
            what = f"the file unpacks to {more} and over data.max_document_bytes ({format_bytes(piece.most)})"
            batch.add(BadDocument(file.location, what, too_large=True))
        elif data := data.removeprefix(BOM):
            batch.add(data.decode())
    except UnicodeDecodeError as error:
        batch.add(BadDocument(file.location, not_utf8(data, error)))
    except Exception as error:
        if not is_damage(error):
            raise
        batch.add(damaged(file.location, error))
    return batch


def _up_to(stream: BinaryIO, most: float) -> bytes:
    """Read a whole stream, or a little more than `most` bytes of it."""
    if most == math.inf:
        return stream.read()
    parts = []
    size = 0
    while size <= most and (block := stream.read(_BLOCK)):
        parts.append(block)
        size += len(block)
    return b"".join(parts)

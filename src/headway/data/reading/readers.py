"""From a piece of a file to texts, a batch at a time; what is malformed is reported with its place, not raised."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from typing import Any

from headway.core.errors import DataError
from headway.data.reading.compression import is_damage, open_content
from headway.data.reading.documents import BadDocument, Batch
from headway.data.reading.json_lines import BOM, damaged, not_utf8, read_json_lines
from headway.data.reading.pieces import Piece
from headway.data.reading.places import unreadable
from headway.data.reading.records import BadRecordError, check_fields, text_getter, wanted_fields
from headway.data.reading.tables import read_arrow, read_parquet

_BATCH = 2**20
# What a malformed row counts for in the size of a batch, so that a file of them does not pile up in memory.
_BAD = 200


def read_batches(piece: Piece) -> Iterator[Batch]:
    """The documents of a piece in input order, in batches of about a mebibyte of text.

    Raises:
        ConfigError: the file needs an extra that is not installed.
        DataError: the table has no such column: a mistake in the config, not in a document; or the file cannot be read,
            is gone, or (a remote one) is not what it was when it was listed.
    """
    file = piece.file
    if piece.problem is not None:
        raise piece.problem
    try:
        if piece.texts is not None:
            yield Batch(list(piece.texts), list(piece.bad), Counter(dict(piece.empty)))
        elif file.format == "jsonl":
            yield from read_json_lines(file, piece.span, piece.field, piece.template)
        elif file.format == "parquet":
            yield from read_parquet(file, piece.span or (0, 0), piece.field, piece.template)
        elif file.format == "arrow":
            yield from read_arrow(file, piece.span, piece.field, piece.template)
        elif file.format == "csv":
            yield from _read_csv(piece)
        else:
            yield _read_text(piece)
    except OSError as error:
        raise unreadable(file.location, error) from error


def _read_text(piece: Piece) -> Batch:
    batch, where = Batch([]), piece.file.location
    try:
        with open_content(piece.file) as stream:
            data = stream.read().removeprefix(BOM)
        if data:
            batch.add(data.decode())
    except UnicodeDecodeError as error:
        batch.add(BadDocument(where, not_utf8(data, error)))
    except Exception as error:
        if not is_damage(error):
            raise
        batch.add(damaged(where, error))
    return batch


def _read_csv(piece: Piece) -> Iterator[Batch]:
    batch, size = Batch([]), 0
    for document in _csv_documents(piece):
        batch.add(document)
        size += len(document) if isinstance(document, str) else _BAD
        if size >= _BATCH:
            yield batch
            batch, size = Batch([]), 0
    yield batch


def _csv_documents(piece: Piece) -> Iterator[str | BadDocument]:
    location = piece.file.location
    csv.field_size_limit(2**31 - 1)  # the module's default of 128 KiB is shorter than many documents
    text_of = text_getter(piece.field, piece.template)
    last = 0
    try:
        with open_content(piece.file) as stream:
            # Bytes that are no UTF-8 become surrogates here and are found by `text_of`, in the fields that matter.
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            rows = csv.reader(lines, strict=True)
            header = _csv_header(rows, f"{location}:1")
            if header is None:
                return
            check_fields(header, piece.field, piece.template, f"{location}:1")
            columns = [(name, header.index(name)) for name in wanted_fields(piece.field, piece.template)]
            while True:
                last = rows.line_num
                try:
                    row = next(rows)
                    if any(row[len(header) :]):
                        # A comma that nobody quoted: what stands behind it would be lost without a word.
                        yield BadDocument(f"{location}:{last + 1}", f"row has {len(row)} columns, not {len(header)}")
                    elif row:
                        yield text_of({name: row[column] for name, column in columns})
                except StopIteration:
                    return
                except IndexError:
                    yield BadDocument(f"{location}:{last + 1}", f"row has {len(row)} of {len(header)} columns")
                except csv.Error as error:
                    # A quote is where none may be, so no quote behind it tells text from what stands between texts:
                    # any line may be one of this row's.
                    reason = f"not valid CSV: {error}; nothing tells where the next row begins"
                    yield BadDocument(f"{location}:{last + 1}", reason, rest=True)
                    return
                except BadRecordError as error:
                    yield BadDocument(f"{location}:{last + 1}", str(error))
    except Exception as error:
        if not is_damage(error):
            raise
        yield damaged(f"{location}:{last + 1}", error)


def _csv_header(rows: Any, where: str) -> list[str] | None:
    """The names of a CSV file's columns; None when the file is empty.

    Raises:
        DataError: its first line is no row.
    """
    try:
        header: list[str] | None = next(rows, None)
    except csv.Error as error:
        raise DataError(f"the names of the columns are not valid CSV: {error}", where=where, fix="repair it") from None
    return header

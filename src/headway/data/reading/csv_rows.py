"""CSV files to documents, row by row; a row that is larger than it may be is never held as a whole.

What Python's `csv` holds of a row is bounded by counting the bytes that are read until one ends. Where a row grows too
large, or nearly, the file is read once more from its beginning: then the ends of rows are looked for first, by the
rules that `csv` has, and each row is parsed by itself.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, cast

from headway.core.errors import DataError
from headway.core.format import format_bytes
from headway.data.reading.compression import BlockReader, is_damage, open_content
from headway.data.reading.documents import BadDocument, too_large
from headway.data.reading.json_lines import BOM, damaged
from headway.data.reading.pieces import Piece
from headway.data.reading.records import BadRecordError, check_fields, text_getter, wanted_fields

# Bytes that are looked through for the ends of rows at a time.
_BLOCK = 2**16
# Bytes of a row that is too large, in limits, which are counted before it is reported: a row may have no end.
_COUNTED = 16
_COMMA, _QUOTE = b',"'


class _TooLargeError(Exception):
    """A row is larger than it may be."""


@dataclass(frozen=True)
class _LargeRow:
    """Stands for a row that is larger than it may be."""

    size: int
    more: bool
    """It has more than `size` bytes; nobody has counted how many."""
    rest: bool
    """The file ends within its quotes."""


#: A row's values, or None where a large row ends that was given before; and lines of the file up to its end.
_Row = tuple[list[str] | _LargeRow | None, int]


def csv_documents(piece: Piece) -> Iterator[str | BadDocument]:
    """Yield the text of each row, or what is wrong with it.

    Raises:
        DataError: the first row names no columns, or not those that are wanted.
    """
    csv.field_size_limit(2**31 - 1)  # the module's default of 128 KiB is shorter than many documents
    table = _Table(piece)
    try:
        try:
            with open_content(piece.file) as stream:
                yield from table.documents(_quick_rows(stream, piece.most))
        except _TooLargeError:
            with open_content(piece.file) as stream:
                yield from table.documents(islice(_careful_rows(stream, piece.most), table.rows, None))
    except Exception as error:
        if not is_damage(error):
            raise
        yield damaged(table.place, error)


class _Table:
    """A CSV file as far as it has been read.

    Attributes:
        rows: Rows so far, the first one included.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece, self.rows, self._lines = piece, 0, 0
        self._names: list[str] | None = None

    @property
    def place(self) -> str:
        """Where the next row begins."""
        return f"{self._piece.file.location}:{self._lines + 1}"

    def documents(self, rows: Iterator[_Row]) -> Iterator[str | BadDocument]:
        """Yield the documents of rows that come next.

        Raises:
            DataError: the first row names no columns, or not those that are wanted.
            _TooLargeError: `rows` cannot give a row.
        """
        try:
            if self._names is None and not self._begin(rows):
                return
            names, columns = self._names or [], self._columns()
            text_of = text_getter(self._piece.field, self._piece.template)
            for values, lines in rows:
                if values:
                    # Rows that are as they should be are read right here: there are many.
                    if type(values) is list and len(values) == len(names):
                        try:
                            yield text_of({name: values[column] for name, column in columns})
                        except BadRecordError as error:
                            yield BadDocument(self.place, str(error))
                    else:
                        yield self._odd(values, names)
                self.rows, self._lines = self.rows + 1, lines
        except csv.Error as error:
            if self._names is None:
                what = f"the names of the columns are not valid CSV: {error}"
                raise DataError(what, where=self.place, fix="repair it") from None
            # A quote is where none may be, so no quote behind it tells text from what stands between texts: any line
            # may be one of this row's.
            yield BadDocument(self.place, f"not valid CSV: {error}; nothing tells where the next row begins", rest=True)

    def _begin(self, rows: Iterator[_Row]) -> bool:
        """Take the first row for the names of the columns; whether there is one."""
        for values, lines in rows:
            if not isinstance(values, list):
                most = format_bytes(self._piece.most)
                raise DataError(
                    f"the names of the columns have more than {most} (data.max_document_bytes)",
                    where=self.place,
                    fix="check the source's format",
                )
            check_fields(values, self._piece.field, self._piece.template, self.place)
            self._names, self.rows, self._lines = values, 1, lines
            return True
        return False

    def _columns(self) -> list[tuple[str, int]]:
        """Names and places of the columns that are wanted."""
        assert self._names is not None
        return [(name, self._names.index(name)) for name in wanted_fields(self._piece.field, self._piece.template)]

    def _odd(self, values: list[str] | _LargeRow, names: list[str]) -> str | BadDocument:
        """Return the document of a row that is too large, too long or too short."""
        if isinstance(values, _LargeRow):
            return too_large(self.place, "row", values.size, self._piece.most, more=values.more, rest=values.rest)
        if any(values[len(names) :]):
            # A comma that nobody quoted: what stands behind it would be lost without a word.
            return BadDocument(self.place, f"row has {len(values)} columns, not {len(names)}")
        try:
            text_of = text_getter(self._piece.field, self._piece.template)
            return text_of({name: values[column] for name, column in self._columns()})
        except IndexError:
            return BadDocument(self.place, f"row has {len(values)} of {len(names)} columns")
        except BadRecordError as error:
            return BadDocument(self.place, str(error))


def _quick_rows(stream: BinaryIO, most: int) -> Iterator[_Row]:
    """Rows as `csv` finds them.

    Raises:
        _TooLargeError: one has more than `most` bytes, or nearly.
    """
    guard = _RowGuard(stream, most)
    # Bytes that are no UTF-8 become surrogates here and are found in the fields that matter.
    text = io.TextIOWrapper(cast(BinaryIO, guard), encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, strict=True)
    for values in rows:
        if guard.since_row > most - guard.block:
            raise _TooLargeError  # what was left of the block before may be of this row
        guard.since_row = 0
        yield values, rows.line_num


class _RowGuard(io.RawIOBase):
    """A stream's bytes, as long as rows end among them.

    Args:
        stream: The bytes.
        most: Those that a row may have.

    Attributes:
        since_row: Bytes that have been read since a row ended; whoever sees one end sets it to 0.
        block: Bytes that were read at a time, at most.
    """

    def __init__(self, stream: BinaryIO, most: int) -> None:
        super().__init__()
        self._read = cast(Any, stream).read1
        self._most, self.since_row, self.block = most, 0, 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int) -> bytes:
        """Read as `TextIOWrapper` does it."""
        data: bytes = self._read(size)
        self.since_row += len(data)
        self.block = max(self.block, len(data))
        if self.since_row > self._most + size:
            raise _TooLargeError
        return data


def _careful_rows(stream: BinaryIO, most: int) -> Iterator[_Row]:
    """The same rows, found without holding those that have more than `most` bytes."""
    scan = _RowScan()
    parts: list[bytes] = []
    size = lines = 0
    told = False
    for block in _blocks(BlockReader(stream)):
        start = 0
        while (found := scan.row_end(block, start)) is not None:
            end, following = found
            size += end - start
            lines += _line_ends(block[start:following])
            parts.append(block[start:end])
            large = _LargeRow(size, more=False, rest=False) if size > most else None
            yield None if told else large or _parsed(parts), lines
            parts, size, told, start = [], 0, False, following
        size += len(block) - start
        lines += _line_ends(block[start:])
        parts.append(block[start:])
        if size > most:
            parts.clear()
        if size > _COUNTED * most and not told:
            told = True
            yield _LargeRow(size, more=True, rest=False), lines
    if size and not told:  # the last row has no line end
        yield _LargeRow(size, more=False, rest=scan.is_quoted) if size > most else _parsed(parts), lines + 1


def _blocks(reader: BlockReader) -> Iterator[bytes]:
    """A file's bytes without a byte order mark; no block ends in the middle of a line end."""
    mark, held = BOM, b""
    while block := reader.read(_BLOCK):
        block = held + block.removeprefix(mark)
        mark, held = b"", b"\r" if block.endswith(b"\r") else b""
        yield block.removesuffix(held)
    yield held


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _parsed(parts: list[bytes]) -> list[str]:
    """The values of one row."""
    return next(csv.reader([b"".join(parts).decode("utf-8", "surrogateescape")], strict=True))


class _RowScan:
    """Finds the ends of rows in blocks of bytes, with the states that Python's `csv` has (Modules/_csv.c), but none
    for what it refuses."""

    _STOP = re.compile(rb"[,\r\n]")

    def __init__(self) -> None:
        self._begins, self.is_quoted, self._after_quote = True, False, False

    def row_end(self, data: bytes, start: int) -> tuple[int, int] | None:
        """Return where the row that goes on at `start` ends, and where the next one begins; None when it goes on
        behind the block."""
        place = start
        while place < len(data):
            if self.is_quoted:
                place = data.find(b'"', place)
                if place < 0:
                    return None
                self.is_quoted, self._after_quote = False, True
            elif data[place] == _QUOTE and (self._begins or self._after_quote):
                self.is_quoted, self._begins, self._after_quote = True, False, False
            else:
                stop = self._STOP.search(data, place)
                self._begins, self._after_quote = stop is not None, False
                if stop is None:
                    return None
                place = stop.start()
                if data[place] != _COMMA:
                    return place, place + (2 if data.startswith(b"\r\n", place) else 1)
            place += 1
        return None

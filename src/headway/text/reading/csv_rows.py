"""Reader of documents from CSV files, row by row. A row above the size limit is never held in memory as a whole.

The memory of Python's `csv` is bounded by a count of the bytes read since the last row ended. If a row comes near the
limit, the file is read again from its beginning: a scanner with the rules of `csv` then finds the ends of rows, and
each row is parsed by itself.
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
from headway.text.reading.compression import BlockReader, is_damage, open_content
from headway.text.reading.documents import BadDocument, BadRecordError, too_large
from headway.text.reading.json_lines import BOM, damaged
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile
from headway.text.reading.records import check_fields, text_getter, wanted_fields

# Bytes scanned for the ends of rows at a time.
_BLOCK = 2**16
# A row too large is reported at its end, or at this multiple of the limit, since a row may have no end.
_COUNTED = 16
_QUOTE = ord('"')
# Other delimiters than that of a file, which its first line shows if the file has them.
_DELIMITERS = ",\t;|"


def first_rows(file: SourceFile, count: int, most: int) -> list[list[str]]:
    """Return the first rows of a file, that of the names included; fewer before one that is too large or damaged."""
    csv.field_size_limit(2**31 - 1)
    rows: list[list[str]] = []
    try:
        with open_content(file, 0, _BLOCK) as stream:
            for values, _ in islice(_quick_rows(stream, min(most, 2**20), file.delimiter), count):
                rows.append(cast(list[str], values))
    except (_TooLargeError, csv.Error):
        pass
    except Exception as error:
        if not is_damage(error):
            raise
    return rows


class _TooLargeError(Exception):
    """A row exceeds the size limit."""


@dataclass(frozen=True)
class _LargeRow:
    """Placeholder for a row above the size limit."""

    size: int
    more: bool
    """Whether it has more than `size` bytes, because the count stopped there."""
    rest: bool
    """Whether the file ends within its quotes."""


#: Values of a row (None at the end of a large row that was already reported), and the lines of the file up to its end.
_Row = tuple[list[str] | _LargeRow | None, int]


def csv_documents(piece: Piece) -> Iterator[str | BadDocument]:
    """Yield the text of each row, or a record of what is wrong with it.

    Raises:
        DataError: the first row does not name the needed columns.
    """
    csv.field_size_limit(2**31 - 1)  # the module's default of 128 KiB is shorter than many documents
    table = _Table(piece)
    try:
        try:
            with open_content(piece.file) as stream:
                yield from table.documents(_quick_rows(stream, piece.most, piece.file.delimiter))
        except _TooLargeError:
            with open_content(piece.file) as stream:
                rows = _careful_rows(stream, piece.most, piece.file.delimiter)
                yield from table.documents(islice(rows, table.rows, None))
    except Exception as error:
        if not is_damage(error):
            raise
        yield damaged(table.place, error)


class _Table:
    """Progress through a CSV file.

    Attributes:
        rows: Rows so far, the header included.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self.rows = 0
        self._lines = 0
        self._names: list[str] | None = None

    @property
    def place(self) -> str:
        """Place of the next row."""
        return f"{self._piece.file.location}:{self._lines + 1}"

    def documents(self, rows: Iterator[_Row]) -> Iterator[str | BadDocument]:
        """Yield the documents of the next rows.

        Raises:
            DataError: the first row does not name the needed columns.
            _TooLargeError: `rows` met a row above the size limit.
        """
        try:
            if self._names is None and not self._read_header(rows):
                return
            names = self._names or []
            columns = self._columns()
            text_of = text_getter(self._piece.field, self._piece.template)
            for values, lines in rows:
                if values:
                    # The common case is inlined for speed.
                    if type(values) is list and len(values) == len(names):
                        try:
                            yield text_of({name: values[column] for name, column in columns})
                        except BadRecordError as error:
                            yield BadDocument(self.place, str(error))
                    else:
                        yield self._irregular(values, names)
                self.rows = self.rows + 1
                self._lines = lines
        except csv.Error as error:
            if self._names is None:
                what = f"the names of the columns are not valid CSV: {error}"
                raise DataError(what, where=self.place, fix="repair it") from None
            # A misplaced quote makes every later quote ambiguous, so any later line may belong to this row.
            what = f"not valid CSV: {error}; the start of the next row cannot be determined"
            yield BadDocument(self.place, what, rest=True)

    def _read_header(self, rows: Iterator[_Row]) -> bool:
        """Read the names of the columns from the first row; return whether there is one."""
        for values, lines in rows:
            if not isinstance(values, list):
                most = format_bytes(self._piece.most)
                raise DataError(
                    f"the names of the columns have more than {most} (data.max_document_bytes)",
                    where=self.place,
                    fix="check the source's format",
                )
            self._check_divided(values)
            check_fields(values, self._piece.field, self._piece.template, self.place)
            self._names = values
            self.rows = 1
            self._lines = lines
            return True
        return False

    def _check_divided(self, names: list[str]) -> None:
        """Check that the first row is not all names in one, because another delimiter stands between them.

        Raises:
            DataError: it is.
        """
        there = [sign for sign in _DELIMITERS if sign in names[0]] if len(names) == 1 else []
        if there and not self._piece.file.delimiter_given:
            wanted = _shown(there[0])
            used = _shown(self._piece.file.delimiter)
            raise DataError(
                f"the first line is one name, {names[0]!r:.80}, with another delimiter in it",
                where=self.place,
                fix=f"set the source's delimiter: '{wanted}' (or '{used}' if it is one name)",
            )

    def _columns(self) -> list[tuple[str, int]]:
        """Return names and places of the needed columns."""
        assert self._names is not None
        return [(name, self._names.index(name)) for name in wanted_fields(self._piece.field, self._piece.template)]

    def _irregular(self, values: list[str] | _LargeRow, names: list[str]) -> str | BadDocument:
        """Return the document of a row that is too large, too long or too short."""
        if isinstance(values, _LargeRow):
            return too_large(self.place, "row", values.size, self._piece.most, more=values.more, rest=values.rest)
        if any(values[len(names) :]):
            # Probably a comma without quotes. To accept the row would silently drop the text after it.
            return BadDocument(self.place, f"row has {len(values)} columns, not {len(names)}")
        try:
            text_of = text_getter(self._piece.field, self._piece.template)
            return text_of({name: values[column] for name, column in self._columns()})
        except IndexError:
            return BadDocument(self.place, f"row has {len(values)} of {len(names)} columns")
        except BadRecordError as error:
            return BadDocument(self.place, str(error))


def _shown(delimiter: str) -> str:
    return "tab" if delimiter == "\t" else delimiter


def _quick_rows(stream: BinaryIO, most: int, delimiter: str) -> Iterator[_Row]:
    """Yield rows as `csv` finds them.

    Raises:
        _TooLargeError: a row has more than `most` bytes, or nearly as many.
    """
    guard = _RowGuard(stream, most)
    # Invalid UTF-8 becomes surrogates here, which are detected later in the fields that matter.
    text = io.TextIOWrapper(cast(BinaryIO, guard), encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, strict=True, delimiter=delimiter)
    for values in rows:
        if guard.since_row > most - guard.block:
            raise _TooLargeError  # the rest of the previous block may belong to this row
        guard.since_row = 0
        yield values, rows.line_num


class _RowGuard(io.RawIOBase):
    """A stream that raises an error when too many bytes are read without the end of a row.

    Args:
        stream: The bytes.
        most: Size limit of a row in bytes.

    Attributes:
        since_row: Bytes read since a row ended; the reader of rows resets it to 0.
        block: Largest number of bytes read at a time.
    """

    def __init__(self, stream: BinaryIO, most: int) -> None:
        super().__init__()
        self._read = cast(Any, stream).read1
        self._most = most
        self.since_row = 0
        self.block = 0

    def readable(self) -> bool:
        return True

    def read1(self, size: int) -> bytes:
        """Read up to `size` bytes; `TextIOWrapper` calls this."""
        data: bytes = self._read(size)
        self.since_row += len(data)
        self.block = max(self.block, len(data))
        if self.since_row > self._most + size:
            raise _TooLargeError
        return data


def _careful_rows(stream: BinaryIO, most: int, delimiter: str) -> Iterator[_Row]:
    """Yield the same rows as `_quick_rows`, without holding rows of more than `most` bytes in memory."""
    scan = _RowScan(delimiter)
    parts: list[bytes] = []
    size = lines = 0
    reported = False
    for block in _blocks(BlockReader(stream)):
        start = 0
        while (found := scan.row_end(block, start)) is not None:
            end, following = found
            size += end - start
            lines += _line_ends(block[start:following])
            parts.append(block[start:end])
            large = _LargeRow(size, more=False, rest=False) if size > most else None
            yield None if reported else large or _parsed(parts, delimiter), lines
            parts = []
            size = 0
            reported = False
            start = following
        size += len(block) - start
        lines += _line_ends(block[start:])
        parts.append(block[start:])
        if size > most:
            parts.clear()
        if size > _COUNTED * most and not reported:
            reported = True
            yield _LargeRow(size, more=True, rest=False), lines
    if size and not reported:  # the last row has no line end
        yield _LargeRow(size, more=False, rest=scan.is_quoted) if size > most else _parsed(parts, delimiter), lines + 1


def _blocks(reader: BlockReader) -> Iterator[bytes]:
    """Yield a file's bytes in blocks, without a byte order mark; no block ends inside a line end."""
    mark = BOM
    held = b""
    while block := reader.read(_BLOCK):
        block = held + block.removeprefix(mark)
        mark = b""
        held = b"\r" if block.endswith(b"\r") else b""
        yield block.removesuffix(held)
    yield held


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _parsed(parts: list[bytes], delimiter: str) -> list[str]:
    """Parse the bytes of one row."""
    return next(csv.reader([b"".join(parts).decode("utf-8", "surrogateescape")], strict=True, delimiter=delimiter))


class _RowScan:
    """Scanner for the ends of rows in blocks of bytes.

    It has the states of Python's `csv` (Modules/_csv.c), without those for malformed rows.
    """

    def __init__(self, delimiter: str) -> None:
        self._delimiter = ord(delimiter)
        self._stop = re.compile(rb"[%s\r\n]" % re.escape(delimiter.encode()))
        self._begins = True
        self.is_quoted = False
        self._after_quote = False

    def row_end(self, data: bytes, start: int) -> tuple[int, int] | None:
        """Return the end of the row that continues at `start`, and the start of the next row.

        Returns None if the row does not end in this block.
        """
        place = start
        while place < len(data):
            if self.is_quoted:
                place = data.find(b'"', place)
                if place < 0:
                    return None
                self.is_quoted = False
                self._after_quote = True
            elif data[place] == _QUOTE and (self._begins or self._after_quote):
                self.is_quoted = True
                self._begins = False
                self._after_quote = False
            else:
                stop = self._stop.search(data, place)
                self._begins = stop is not None
                self._after_quote = False
                if stop is None:
                    return None
                place = stop.start()
                if data[place] != self._delimiter:
                    return place, place + (2 if data.startswith(b"\r\n", place) else 1)
            place += 1
        return None

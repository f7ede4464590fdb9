"""Guard against Parquet pages that unpack to too much, by their headers on the way to the library.

A page header declares the unpacked size, and the library allocates that much. A few bytes can declare a page of 2 GB,
and a value shared by many rows (through a dictionary, or as a prefix of the next value) is copied for each row. The
sizes in the footer need not be true. Headers use Thrift's compact protocol (parquet.thrift: PageHeader).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, BinaryIO

from headway.core.format import format_bytes
from headway.text.reading.documents import TooLargeError

# Kinds of pages and encodings, as in parquet.thrift.
_DICTIONARY_PAGE = 2
_DELTA_BYTE_ARRAY = 7
# Fields of a PageHeader: kind, unpacked bytes, packed bytes; the headers of both kinds of data pages.
_KIND = 1
UNPACKED_BYTES = 2
_PACKED = 3
_DATA = 5
_DATA_V2 = 8
# Field of the encoding in those two headers.
_ENCODINGS = {_DATA: 2, _DATA_V2: 4}
# Upper limit of a header in bytes; some writers store the smallest and the largest value in it.
_LARGEST_HEADER = 16 * 2**20
_DEEPEST = 8
# Types of the compact protocol.
_TRUE = 1
_FALSE = 2
_BYTE = 3
_DOUBLE = 7
_BINARY = 8
_STRUCT = 12


class PageGuard:
    """A Parquet file for `pyarrow` that checks the header of each page before it returns the page.

    Args:
        stream: The open file.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._next: list[int] = []
        self._begun: dict[int, bytes] = {}
        self._most = self._rows = 0
        self.seek = stream.seek
        self.tell = stream.tell
        self.close = stream.close
        self.readable = stream.readable
        self.seekable = stream.seekable
        self.writable = stream.writable

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._stream.closed

    def watch(self, chunks: Iterable[tuple[int, int]], most: int, rows: int) -> None:
        """Check the pages of some column chunks from now on.

        Args:
            chunks: Start and end of each chunk.
            most: Limit of the unpacked bytes of a page, or of the rows decoded at once.
            rows: Number of rows decoded at once.
        """
        ordered = sorted(chunks)
        self._starts = [start for start, _ in ordered]
        self._ends = [end for _, end in ordered]
        self._next = list(self._starts)
        self._most = most
        self._rows = rows

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, and check the headers of the pages that begin in them.

        Raises:
            TooLargeError: a page unpacks to too much.
            ValueError: the header of a page is invalid.
        """
        if not self._starts:
            return self._stream.read(size)
        position = self._stream.tell()
        data = self._stream.read(size)
        number = max(0, bisect_right(self._starts, position) - 1)
        while number < len(self._starts) and self._starts[number] < position + len(data):
            self._check_pages(number, position, data)
            number += 1
        return data

    def _check_pages(self, number: int, position: int, data: bytes) -> None:
        """Check the page headers of one column chunk in some bytes of the file."""
        at = self._next[number]
        begun = self._begun.pop(number, b"")
        if begun and at + len(begun) == position:
            position = at
            data = begun + data
        while position <= at < min(position + len(data), self._ends[number]):
            try:
                header, size = page_header(data, at - position)
            except IndexError:  # the next read returns the rest of the header
                self._begun[number] = data[at - position :]
                if len(self._begun[number]) > _LARGEST_HEADER:
                    raise ValueError(f"the header of the page at byte {at:,} has no end") from None
                break
            self._check(header, at)
            at += size + header[_PACKED]
        self._next[number] = at

    def _check(self, header: dict[int, Any], at: int) -> None:
        """Raise an error for a page that would exhaust memory."""
        if min(header.get(UNPACKED_BYTES, -1), header.get(_PACKED, -1)) < 0:
            raise ValueError(f"the page at byte {at:,} has no size")
        unpacked = header[UNPACKED_BYTES]
        what = f"the page at byte {at:,} unpacks to"
        if header.get(_KIND) == _DICTIONARY_PAGE or _encoding(header) == _DELTA_BYTE_ARRAY:
            # Each row may get a copy of the largest value.
            unpacked = unpacked * self._rows
            what = f"{self._rows} rows with values of the page at byte {at:,} can have"
        if unpacked > self._most:
            raise TooLargeError(f"{what} {format_bytes(unpacked)}", self._most)


def page_header(data: bytes, start: int) -> tuple[dict[int, Any], int]:
    """Decode the header of a page.

    Returns:
        Its fields by number, nested structs included, and its bytes.

    Raises:
        IndexError: the header extends beyond `data`.
        ValueError: the header is invalid.
    """
    fields, end = _struct(data, start, 0)
    if end > len(data):
        raise IndexError
    return fields, end - start


def _encoding(header: dict[int, Any]) -> int | None:
    for kind, field in _ENCODINGS.items():
        if isinstance(header.get(kind), dict):
            found = header[kind].get(field)
            return found if isinstance(found, int) else None
    return None


def _struct(data: bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    if depth > _DEEPEST:
        raise ValueError("the header of a page is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while byte := data[place]:
        place += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, place = _integer(data, place)
        fields[number], place = _value(data, place, byte & 15, depth)
    return fields, place + 1


def _value(data: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, place
    if kind == _BYTE:
        return data[place], place + 1
    if _BYTE < kind < _DOUBLE:
        return _integer(data, place)
    if kind == _DOUBLE:
        return None, place + 8
    if kind == _BINARY:
        size, place = _varint(data, place)
        return None, place + size
    if kind == _STRUCT:
        return _struct(data, place, depth + 1)
    raise ValueError("the header of a page has a field of an unknown type")


def _integer(data: bytes, place: int) -> tuple[int, int]:
    value, place = _varint(data, place)
    return (value >> 1) ^ -(value & 1), place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("the header of a page has a number without an end")

"""How much the pages of a Parquet file unpack to, read from their headers on their way to the library.

A page says what it unpacks to, and the library makes room for that. A few bytes can be a page of 2 GB, and a value that
many rows share (by a dictionary, or as the beginning of the next one) is copied for each of them. What the footer says
of sizes need not be so. Headers are in Thrift's compact protocol (parquet.thrift: PageHeader).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, BinaryIO

from headway.core.format import format_bytes
from headway.data.reading.documents import TooLargeError

# Kinds of pages and encodings, as in parquet.thrift.
_DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 2, 7
# Fields of a PageHeader: its kind, what it unpacks to, what it is packed to; the headers of both kinds of data pages.
_KIND, UNPACKED_BYTES, _PACKED, _DATA, _DATA_V2 = 1, 2, 3, 5, 8
# The encoding in them.
_ENCODINGS = {_DATA: 2, _DATA_V2: 4}
# Bytes of a header, in which some writers put the least and the greatest value.
_LARGEST_HEADER = 16 * 2**20
_DEEPEST = 8
# Types of the compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 7, 8, 12


class PageGuard:
    """A Parquet file for `pyarrow` that looks at the header of each page before it hands it on.

    Args:
        stream: The file, open.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._next: list[int] = []
        self._begun: dict[int, bytes] = {}
        self._most = self._rows = 0
        self.seek, self.tell, self.close = stream.seek, stream.tell, stream.close
        self.readable, self.seekable, self.writable = stream.readable, stream.seekable, stream.writable

    @property
    def closed(self) -> bool:
        """Whether it is."""
        return self._stream.closed

    def watch(self, chunks: Iterable[tuple[int, int]], most: int, rows: int) -> None:
        """Look at the pages of some column chunks from now on.

        Args:
            chunks: Where each begins and ends.
            most: Bytes that a page, or the rows that are decoded at once, may unpack to.
            rows: How many those are.
        """
        ordered = sorted(chunks)
        self._starts, self._ends = [start for start, _ in ordered], [end for _, end in ordered]
        self._next, self._most, self._rows = list(self._starts), most, rows

    def read(self, size: int = -1) -> bytes:
        """Read as a file does.

        Raises:
            TooLargeError: a page that begins here unpacks to too much.
            ValueError: the header of a page that begins here is none.
        """
        if not self._starts:
            return self._stream.read(size)
        position = self._stream.tell()
        data = self._stream.read(size)
        number = max(0, bisect_right(self._starts, position) - 1)
        while number < len(self._starts) and self._starts[number] < position + len(data):
            self._look(number, position, data)
            number += 1
        return data

    def _look(self, number: int, position: int, data: bytes) -> None:
        """Look at the headers of a column chunk's pages in some bytes of the file."""
        at, begun = self._next[number], self._begun.pop(number, b"")
        if begun and at + len(begun) == position:
            position, data = at, begun + data
        while position <= at < min(position + len(data), self._ends[number]):
            try:
                header, size = page_header(data, at - position)
            except IndexError:  # the rest of it comes with what is read next
                self._begun[number] = data[at - position :]
                if len(self._begun[number]) > _LARGEST_HEADER:
                    raise ValueError(f"the header of the page at byte {at:,} has no end") from None
                break
            self._check(header, at)
            at += size + header[_PACKED]
        self._next[number] = at

    def _check(self, header: dict[int, Any], at: int) -> None:
        """Refuse a page that would fill memory."""
        if min(header.get(UNPACKED_BYTES, -1), header.get(_PACKED, -1)) < 0:
            raise ValueError(f"the page at byte {at:,} has no size")
        unpacked, what = header[UNPACKED_BYTES], f"the page at byte {at:,} unpacks to"
        if header.get(_KIND) == _DICTIONARY_PAGE or _encoding(header) == _DELTA_BYTE_ARRAY:
            unpacked, what = unpacked * self._rows, f"{self._rows} rows with values of the page at byte {at:,} can have"
        if unpacked > self._most:
            raise TooLargeError(f"{what} {format_bytes(unpacked)}", self._most)


def page_header(data: bytes, start: int) -> tuple[dict[int, Any], int]:
    """Return the fields of the header of a page by their numbers, those inside others too, and its bytes.

    Raises:
        IndexError: it ends behind `data`.
        ValueError: it is none.
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
    raise ValueError("the header of a page has a field of a type that none has")


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

"""Headers of the messages in an Arrow file: their place, rows and unpacked bytes, known before anything is unpacked.

The layout follows Arrow's columnar format ("Encapsulated message format", "IPC file format"; Message.fbs, File.fbs).
Headers are flatbuffers; this module decodes the few needed fields by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Kinds of messages, as in Message.fbs.
SCHEMA = 1
DICTIONARY = 2
RECORDS = 3

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
# Upper limit of a header in bytes; even a million columns need less.
_LARGEST_HEADER = 2**28


class MalformedError(ValueError):
    """An Arrow file has an invalid layout; the message says where."""


@dataclass(frozen=True)
class Message:
    """One message of a stream or file."""

    kind: int
    start: int
    end: int
    """Its byte range is [start, end)."""
    rows: int = 0
    """Rows of a record batch."""
    body: int = 0
    """Byte offset of its buffers."""
    packed: tuple[tuple[int, int], ...] = ()
    """Its compressed buffers: offsets in the body, and bytes."""


def stream_messages(stream: Any, start: int, end: int, size: int) -> Iterator[Message]:
    """Yield the messages of an IPC stream that begin in [start, end), in order.

    Args:
        stream: The open file.
        start: Byte offset of a message.
        end: Byte offset at which to stop.
        size: Bytes of the file.

    Raises:
        MalformedError: there is no valid message at the next offset.
    """
    position = start
    while position < end:
        message = message_at(stream, position, size)
        if message is None:
            return
        yield message
        position = message.end


def file_blocks(stream: Any, size: int) -> tuple[list[int], list[int]]:
    """Return the byte offsets of the dictionaries and of the record batches of an IPC file, from its footer.

    Raises:
        MalformedError: the footer is invalid.
    """
    tail = 4 + len(_MAGIC)
    stream.seek(max(0, size - tail))
    (length,) = _unpack("<i", bytes(stream.read(tail)), 0)
    if not 0 < length <= min(size - tail, _LARGEST_HEADER):
        raise MalformedError("the length of its footer is invalid")
    stream.seek(size - tail - length)
    footer = _Table.root(bytes(stream.read(length)))
    blocks = []
    for slot in (2, 3):
        start, count = footer.vector(slot, 24)
        blocks.append([_unpack("<q", footer.data, start + 24 * number)[0] for number in range(count)])
    return blocks[0], blocks[1]


def unpacked_bytes(stream: Any, message: Message) -> int:
    """Return the unpacked bytes that the compressed buffers of a message declare."""
    total = 0
    for offset, length in message.packed:
        if length >= 8:
            stream.seek(message.body + offset)
            (size,) = _unpack("<q", bytes(stream.read(8)), 0)
            total += max(0, size)  # -1 marks a buffer that is not compressed after all
    return total


def message_at(stream: Any, position: int, size: int) -> Message | None:
    """Return the message at a byte offset of a file of `size` bytes; None at the end of a stream.

    Raises:
        MalformedError: there is no valid message.
    """
    if not 0 <= position < size:
        raise MalformedError(f"there is no byte {position:,}, at which a message should begin")
    stream.seek(position)
    prefix = bytes(stream.read(8))
    if len(prefix) < 8:
        # The file is truncated here; the reader of the message reports it.
        return Message(RECORDS, position, size)
    mark, length = struct.unpack("<Ii", prefix)
    header = 8
    if mark != _CONTINUED:  # before Arrow 0.15
        (length,), header = struct.unpack_from("<i", prefix), 4
        stream.seek(position + header)
    if length == 0:
        return None
    if not 0 < length <= _LARGEST_HEADER:
        raise MalformedError(f"the length of the message header at byte {position:,} is invalid")
    try:
        table = _Table.root(bytes(stream.read(length)))
        body = position + header + length
        kind = table.number(1, "<B")
        bytes_of_body = table.number(3, "<q")
        if bytes_of_body < 0:
            raise MalformedError("a body of negative length")
        rows, packed = _records(table.table(2), kind)
    except MalformedError as error:
        raise MalformedError(f"the header of the message at byte {position:,} is damaged: {error}") from None
    return Message(kind, position, min(body + bytes_of_body, size), rows, body, packed)


def _records(header: _Table | None, kind: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return rows and compressed buffers of a record batch, or of the values of a dictionary."""
    records = header.table(1) if header is not None and kind == DICTIONARY else header
    if records is None or kind not in (DICTIONARY, RECORDS):
        return 0, ()
    rows = records.number(0, "<q")
    if rows < 0:
        raise MalformedError("a negative number of rows")
    if records.table(3) is None:
        return rows, ()
    start, count = records.vector(2, 16)
    return rows, tuple(_unpack("<qq", records.data, start + 16 * number) for number in range(count))


class _Table:
    """A table in a flatbuffer ("FlatBuffer Internals"). Fields have numbers; absent ones read as None or 0."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data = data
        self._place = place
        self._slots = place - _unpack("<i", data, place)[0]
        (self._size,) = _unpack("<H", data, self._slots)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """Return the root table of a buffer."""
        return cls(data, _unpack("<I", data, 0)[0])

    def _field(self, number: int) -> int | None:
        slot = 4 + 2 * number
        if slot + 2 > self._size:
            return None
        (offset,) = _unpack("<H", self.data, self._slots + slot)
        return self._place + offset if offset else None

    def number(self, number: int, form: str) -> int:
        """Return a field that is a number."""
        place = self._field(number)
        return int(_unpack(form, self.data, place)[0]) if place is not None else 0

    def table(self, number: int) -> _Table | None:
        """Return a field that is a table."""
        place = self._field(number)
        return _Table(self.data, place + _unpack("<I", self.data, place)[0]) if place is not None else None

    def vector(self, number: int, width: int) -> tuple[int, int]:
        """Return the offset of a vector's elements, of `width` bytes each, and their number."""
        place = self._field(number)
        if place is None:
            return 0, 0
        start = place + _unpack("<I", self.data, place)[0]
        (count,) = _unpack("<I", self.data, start)
        if start + 4 + count * width > len(self.data):
            raise MalformedError("a list ends behind it")
        return start + 4, count


def _unpack(form: str, data: bytes, place: int) -> tuple[Any, ...]:
    if place < 0 or place + struct.calcsize(form) > len(data):
        raise MalformedError(f"it ends before byte {place:,}")
    return struct.unpack_from(form, data, place)

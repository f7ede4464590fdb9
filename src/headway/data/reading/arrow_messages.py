"""What the messages of an Arrow file say of themselves: where they are, how many rows they have, how many bytes they
unpack to. Read from their headers, before anything is unpacked.

The layout is that of Arrow's columnar format ("Encapsulated message format", "IPC file format"; Message.fbs, File.fbs);
headers are flatbuffers, of which the few fields that are wanted here are read by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Kinds of messages, as in Message.fbs.
SCHEMA, DICTIONARY, RECORDS = 1, 2, 3

_MAGIC = b"ARROW1"
_CONTINUED = 0xFFFFFFFF
# Bytes of a header: one of a million columns has fewer.
_LARGEST_HEADER = 2**28


class MalformedError(ValueError):
    """An Arrow file is not laid out as it should be; the message says where."""


@dataclass(frozen=True)
class Message:
    """One message of a stream or file."""

    kind: int
    start: int
    end: int
    """Where it is, in bytes."""
    rows: int = 0
    """Rows of a record batch."""
    body: int = 0
    """Where its buffers begin."""
    packed: tuple[tuple[int, int], ...] = ()
    """Its compressed buffers: places in the body, and bytes."""


def stream_messages(stream: Any, start: int, end: int, size: int) -> Iterator[Message]:
    """Yield the messages of an IPC stream that begin in [start, end), in order.

    Args:
        stream: The file, open.
        start: Where a message begins.
        end: Where to stop.
        size: Bytes of the file.

    Raises:
        MalformedError: what comes next is no message.
    """
    position = start
    while position < end:
        message = message_at(stream, position, size)
        if message is None:
            return
        yield message
        position = message.end


def file_blocks(stream: Any, size: int) -> tuple[list[int], list[int]]:
    """Return where the dictionaries and the record batches of an IPC file begin, as its footer lists them.

    Raises:
        MalformedError: the footer is not as it should be.
    """
    tail = 4 + len(_MAGIC)
    stream.seek(max(0, size - tail))
    (length,) = _unpack("<i", bytes(stream.read(tail)), 0)
    if not 0 < length <= min(size - tail, _LARGEST_HEADER):
        raise MalformedError("its footer has no length that can be")
    stream.seek(size - tail - length)
    footer = _Table.root(bytes(stream.read(length)))
    blocks = []
    for slot in (2, 3):
        start, count = footer.vector(slot, 24)
        blocks.append([_unpack("<q", footer.data, start + 24 * number)[0] for number in range(count)])
    return blocks[0], blocks[1]


def unpacked_bytes(stream: Any, message: Message) -> int:
    """Return the bytes that the compressed buffers of a message say they unpack to."""
    total = 0
    for offset, length in message.packed:
        if length >= 8:
            stream.seek(message.body + offset)
            (size,) = _unpack("<q", bytes(stream.read(8)), 0)
            total += max(0, size)  # -1 stands for one that is not compressed after all
    return total


def message_at(stream: Any, position: int, size: int) -> Message | None:
    """Return the message at a place in a file of so many bytes; None at the end of a stream.

    Raises:
        MalformedError: there is none.
    """
    if not 0 <= position < size:
        raise MalformedError(f"there is no byte {position:,}, at which a message should begin")
    stream.seek(position)
    prefix = bytes(stream.read(8))
    if len(prefix) < 8:
        # Nothing whole can follow; whoever reads it says so.
        return Message(RECORDS, position, size)
    mark, length = struct.unpack("<Ii", prefix)
    header = 8
    if mark != _CONTINUED:  # before Arrow 0.15
        (length,), header = struct.unpack_from("<i", prefix), 4
        stream.seek(position + header)
    if length == 0:
        return None
    if not 0 < length <= _LARGEST_HEADER:
        raise MalformedError(f"the header of the message at byte {position:,} has no length that can be")
    try:
        table, body = _Table.root(bytes(stream.read(length))), position + header + length
        kind, bytes_of_body = table.number(1, "<B"), table.number(3, "<q")
        if bytes_of_body < 0:
            raise MalformedError("a body of negative length")
        rows, packed = _records(table.table(2), kind)
    except MalformedError as error:
        raise MalformedError(f"the header of the message at byte {position:,} is damaged: {error}") from None
    return Message(kind, position, min(body + bytes_of_body, size), rows, body, packed)


def _records(header: _Table | None, kind: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Rows and compressed buffers of a record batch, or of the values of a dictionary."""
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
    """A table in a flatbuffer ("FlatBuffer Internals"): fields by their number, those that are absent as None or 0."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self._place = data, place
        self._slots = place - _unpack("<i", data, place)[0]
        (self._size,) = _unpack("<H", data, self._slots)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """The table that a buffer holds."""
        return cls(data, _unpack("<I", data, 0)[0])

    def _field(self, number: int) -> int | None:
        slot = 4 + 2 * number
        if slot + 2 > self._size:
            return None
        (offset,) = _unpack("<H", self.data, self._slots + slot)
        return self._place + offset if offset else None

    def number(self, number: int, form: str) -> int:
        """A field that is a number."""
        place = self._field(number)
        return int(_unpack(form, self.data, place)[0]) if place is not None else 0

    def table(self, number: int) -> _Table | None:
        """A field that is a table."""
        place = self._field(number)
        return _Table(self.data, place + _unpack("<I", self.data, place)[0]) if place is not None else None

    def vector(self, number: int, width: int) -> tuple[int, int]:
        """Where a field that is a vector has its elements, of so many bytes each, and how many they are."""
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

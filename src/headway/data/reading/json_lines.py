"""JSON Lines to texts, in blocks of about a mebibyte.

`orjson` reads each line. Where it refuses one, the standard library's `json` has the last word, so that exactly what
`json` accepts is accepted (NaN, numbers beyond a double, deep nesting) and messages are those people know. Of repeated
keys both take the last. `orjson` rounds whole numbers of more than 64 bits; where a template shows such a number the
line is read by `json` again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from headway.config.data import MAX_DOCUMENT_BYTES
from headway.data.reading.compression import BlockReader, is_damage, open_content
from headway.data.reading.documents import BadDocument, Batch, too_large
from headway.data.reading.places import SourceFile, open_file, stamp_of
from headway.data.reading.records import BadRecordError, MissingFieldError, text_getter

BOM = b"\xef\xbb\xbf"
BLOCK = 2**20
_TAIL = 2**16
# Counting the lines before a place in a remote file means fetching them.
_COUNTED_REMOTELY = 64 * 2**20
_ONLY_TEXT = {str}

# Bytes of a line that is too long, in limits, which are counted before it is reported: a line may have no end.
_COUNTED = 16


@dataclass(frozen=True)
class LongLine:
    """Stands for a line that is longer than a record may be; no reader of JSON takes it for one."""

    size: int
    more: bool = False
    """It is longer than `size`; nobody has counted by how much."""

    def __len__(self) -> int:
        return self.size


#: A view of a block where that has all of the line: with copies long documents take a third longer to read.
Line = bytes | memoryview | LongLine


def read_json_lines(
    file: SourceFile, span: tuple[int, int] | None, field: str, template: str | None, most: int = MAX_DOCUMENT_BYTES
) -> Iterator[Batch]:
    """The texts of a file, or of the lines that begin in a byte range of it, in batches of about a mebibyte. Lines of
    more than `most` bytes are malformed, and no more of them than that is held in memory."""
    start, end = span or (0, None)
    reader = _LineReader(file, field, template, most)
    try:
        with open_content(file, start, end) as stream:
            for position, lines in _line_blocks(stream, start, end, most):
                yield reader.batch(position, lines)
    except Exception as error:
        if not is_damage(error):
            raise
        yield Batch([], [damaged(reader.where(), error)])


def first_complaint(
    file: SourceFile, field: str, template: str | None, most: int = MAX_DOCUMENT_BYTES
) -> BadDocument | None:
    """What is wrong with the first record, when no record of the file's first mebibyte has the fields wanted."""
    text_of, first = text_getter(field, template), None
    try:
        with open_content(file, 0, BLOCK) as stream:
            _, lines = next(_line_blocks(stream, 0, BLOCK, most), (0, []))
    except Exception as error:
        if not is_damage(error):
            raise
        return None
    for number, line in enumerate(lines, 1):
        if isinstance(line, LongLine):
            continue
        try:
            text_of(_loaded(bytes(line).removeprefix(BOM)))
            return None
        except MissingFieldError as error:
            first = first or BadDocument(f"{file.location}:{number}", str(error))
        except BadRecordError:
            continue
    return first


def damaged(where: str, error: BaseException) -> BadDocument:
    """The rest of a file that cannot be read."""
    return BadDocument(where, f"the file cannot be read from here on: {error}", rest=True)


def _line_blocks(stream: BinaryIO, start: int, end: int | None, most: int) -> Iterator[tuple[int, list[Line]]]:
    """Lines that begin in [start, end), some at a time, with the position of the first; without their line ends."""
    position = _seek_line(stream, start, end)
    if position is None:
        return
    reader, left = BlockReader(stream), None if end is None else end - position
    open_line = _OpenLine(most)
    while block := reader.read(_next_size(left)):
        if left is None or left >= len(block):
            lines, done = _ended_lines(block, len(block))
            rest = block[done:]
        else:
            # The last line that counts begins before byte `left`, and ends with the first line end from there on.
            lines, done = _ended_lines(block, block.find(b"\n", max(0, left - 1)) + 1)
            rest = b"" if done else block
        if lines:
            if open_line.size:
                passed, first = open_line.end(lines[0])
                lines[:1] = [first] if first is not None else []
                position += passed
            if most < BLOCK:  # a block can hold a line that is too long
                lines = [LongLine(len(line)) if len(line) > most else line for line in lines]
            if lines:
                yield position, lines
                position += sum(map(len, lines)) + len(lines)
        if rest:
            open_line.add(rest)
            if open_line.is_endless():
                yield position, [open_line.told()]
        if left is not None and end is not None:
            left -= len(block)
            if left <= 0 and position >= end:
                return
    if open_line.size:
        passed, last = open_line.end(b"")
        if last is not None:
            yield position + passed, [last]


class _OpenLine:
    """A line whose end has not come yet; of one that is too long only the length is kept.

    Args:
        most: Bytes that a line may have.

    Attributes:
        size: Bytes so far; 0 where no line is open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[Line] = []
        self.size, self._told = 0, False

    def add(self, part: bytes) -> None:
        """Add bytes in which the line does not end."""
        self.size += len(part)
        if self.size <= self._most:
            self._parts.append(part)
        else:
            self._parts.clear()

    def is_endless(self) -> bool:
        """Whether it is so long that it should be reported before its end is found."""
        return not self._told and self.size > _COUNTED * self._most

    def told(self) -> LongLine:
        """Return what stands for it now, and no more than once."""
        self._told = True
        return LongLine(self.size, more=True)

    def end(self, part: Line) -> tuple[int, Line | None]:
        """Add its last bytes, and begin anew.

        Returns:
            Where lines behind it begin, from its own beginning on, and the line; or 0 and the line, if it has not been
            reported before.
        """
        size, parts, told = self.size + len(part), [*self._parts, part], self._told
        self._parts, self.size, self._told = [], 0, False
        if told:
            return size + 1, None
        return 0, LongLine(size) if size > self._most else b"".join(parts)  # type: ignore[arg-type]


def _ended_lines(block: bytes, end: int) -> tuple[list[Line], int]:
    """Lines that end in the first `end` bytes, and where the one behind them begins."""
    view, find, start = memoryview(block), block.find, 0
    lines: list[Line] = []
    while (at := find(b"\n", start, end)) >= 0:
        lines.append(view[start:at])
        start = at + 1
    return lines, start


def _next_size(left: int | None) -> int:
    """Bytes to read next; behind the span little, for there only the last line's end is wanted."""
    return BLOCK if left is None else min(BLOCK, left) if left > 0 else _TAIL


def _seek_line(stream: BinaryIO, start: int, end: int | None) -> int | None:
    """Go to the first line that begins at or after byte `start`; where that is, or None when it is not before `end`."""
    if start == 0:
        return 0
    stream.seek(start - 1)
    position = start - 1
    while end is None or position < end:
        # In blocks: the line may be far longer than memory should be.
        block = stream.readline(BLOCK)
        position += len(block)
        if not block:
            return None
        if block.endswith(b"\n"):
            return position if end is None or position < end else None
    return None


class _LineReader:
    """Lines of one piece to batches; knows a line's number when it has to be named."""

    def __init__(self, file: SourceFile, field: str, template: str | None, most: int) -> None:
        self._file, self._field, self._most = file, field, most
        self._text_of = text_getter(field, template)
        self._text_of_orjson = text_getter(field, template, by_orjson=True)
        self._plain = template is None and "." not in field
        self._all_sound = True
        self._first = 0
        self._before: int | None = None  # lines before the piece: counted only when one has to be named
        self._done = 0  # lines of earlier blocks
        self._position, self._lines = 0, list[Line]()  # the block at hand

    def batch(self, position: int, lines: list[Line]) -> Batch:
        """The batch for lines of which the first begins at byte `position`."""
        if not self._lines:
            self._first = position
        if position == 0 and not isinstance(lines[0], LongLine):
            # Another list: who reads the lines still counts the bytes of the ones that it gave.
            lines = [bytes(lines[0]).removeprefix(BOM), *lines[1:]]
        self._done += len(self._lines)
        self._position, self._lines = position, lines
        return self._read_fields() if self._plain else self._read_records()

    def _read_fields(self) -> Batch:
        from orjson import loads

        field = self._field
        if self._all_sound:
            # Lines are taken to be sound until one is not: the loop is a third faster that way.
            try:
                texts = [loads(line)[field] for line in self._lines]  # type: ignore[arg-type]
            except (ValueError, LookupError, TypeError):
                texts = []
            if texts and all(texts) and set(map(type, texts)) == _ONLY_TEXT:
                return Batch(texts)
            self._all_sound = False
        batch = Batch([])
        for number, line in enumerate(self._lines):
            try:
                text = loads(line)[field]  # type: ignore[arg-type]
            except (ValueError, LookupError, TypeError):
                # Blank, malformed, without the field, or for `json` to decide.
                text = ""
            if text and type(text) is str:
                batch.texts.append(text)
            else:
                self._read_slowly(line, number, batch)
        return batch

    def _read_records(self) -> Batch:
        from orjson import loads

        batch, text_of = Batch([]), self._text_of_orjson
        for number, line in enumerate(self._lines):
            try:
                text = text_of(loads(line))  # type: ignore[arg-type]
            except (ValueError, BadRecordError):
                text = ""
            if text:
                batch.texts.append(text)
            else:
                self._read_slowly(line, number, batch)
        return batch

    def _read_slowly(self, line: Line, number: int, batch: Batch) -> None:
        """Read a line with `json`, and say what is wrong with it if anything is."""
        if isinstance(line, LongLine):
            batch.add(too_large(self.where(number), "line", line.size, self._most, more=line.more))
            return
        line = bytes(line)
        if line and not line.isspace():
            try:
                batch.add(self._text_of(_loaded(line)))
            except BadRecordError as error:
                batch.add(BadDocument(self.where(number), str(error)))

    def where(self, number: int | None = None) -> str:
        """The place of a line of the block at hand, or of the one after it."""
        number = len(self._lines) if number is None else number
        if not self._file.local and self._first > _COUNTED_REMOTELY:
            byte = self._position + sum(len(line) + 1 for line in self._lines[:number])
            return f"{self._file.location}:byte {byte:,}"
        if self._before is None:
            self._before = _lines_before(self._file, self._first)
        return f"{self._file.location}:{self._before + self._done + number + 1}"


def _loaded(line: bytes) -> Any:
    # A file of one array, pretty-printed or not, is a common mistake that the parser's words do not name.
    hint = "; an array has to become one object per line: jq -c '.[]'" if line.lstrip()[:1] == b"[" else ""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecordError(not_utf8(line, error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"not valid JSON: {error}{hint}") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"holds {type(record).__name__}, not a JSON object{hint}")
    return record


def not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no text."""
    return f"not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}"


# Bytes, and line ends in them, of the files that this process read last. Pieces of a file come in order, so that many
# bad lines do not mean counting from the beginning many times.
_counted: dict[tuple[str, str | None], tuple[int, int]] = {}


def _lines_before(file: SourceFile, offset: int) -> int:
    """Number of line ends in the first `offset` bytes of a plain file."""
    key = (file.location, stamp_of(file) if file.local else file.version)
    position, count = _counted.get(key, (0, 0))
    if position > offset:
        position, count = 0, 0
    if position < offset:
        with open_file(file, position, offset) as stream:
            stream.seek(position)
            while position < offset and (block := stream.read(min(BLOCK, offset - position))):
                count += block.count(b"\n")
                position += len(block)
        if len(_counted) >= 64:
            _counted.clear()
        _counted[key] = (position, count)
    return count

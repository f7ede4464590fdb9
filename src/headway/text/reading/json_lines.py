"""Reader of texts from JSON Lines, in blocks of about a mebibyte.

`orjson` parses each line. If it rejects a line, the standard library's `json` decides. So the reader accepts exactly
what `json` accepts (NaN, numbers beyond a double, deep nesting), and reports its familiar messages. `orjson` rounds
integers of more than 64 bits; if a template shows such a number, `json` parses the line again.

Both parsers take the last of repeated keys without a word. A record that gives a key twice from which its text is made
is malformed, since which of the two was meant is not known. Counting the keys in the bytes clears nearly all lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

from headway.config.template import LAYOUTS, template_fields
from headway.core.errors import HeadwayError
from headway.core.files.foreign import given_twice, open_regular, repeated_keys
from headway.text.reading.compression import BlockReader, is_damage, is_transcoded, open_content
from headway.text.reading.documents import (
    BadDocument,
    BadRecordError,
    Batch,
    ContentError,
    MissingFieldError,
    batched,
    too_large,
)
from headway.text.reading.json_arrays import ItemTooLongError, array_items, holds_array, read_array
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile, open_file, stamp_of
from headway.text.reading.records import text_getter

BOM = b"\xef\xbb\xbf"
BLOCK = 2**20
_TAIL = 2**16
# Line numbers in a remote file are reported up to this offset only: to count the lines means to fetch them.
_COUNTED_REMOTELY = 64 * 2**20
_ONLY_TEXT = {str}
# Items of an array that show which fields its records have.
_FIRST_ITEMS = 100

# A line too long is reported at its end, or at this multiple of the limit, since a line may have no end.
_COUNTED = 16


@dataclass(frozen=True)
class LongLine:
    """Placeholder for a line above the size limit; every JSON parser rejects it."""

    size: int
    more: bool = False
    """Whether it has more than `size` bytes, because the count stopped there."""

    def __len__(self) -> int:
        return self.size


#: A view if one block holds the whole line: copies would make reading long documents a third slower.
Line = bytes | memoryview | LongLine


def read_json_lines(piece: Piece) -> Iterator[Batch]:
    """Yield the texts of a file, or of the lines that begin in a byte range, in batches of about a mebibyte.

    A `.json` file may hold one array of records instead of lines. A line of more than `piece.most` bytes is malformed,
    and at most that many bytes of it are held in memory.
    """
    start, end = piece.span or (0, None)
    reader = _LineReader(piece)
    try:
        with open_content(piece.file, start, end) as stream:
            if piece.span is None and holds_array(piece.file, stream):
                yield from batched(read_array(stream, piece))
                return
            for position, lines in _line_blocks(stream, start, end, piece.most):
                yield reader.batch(position, lines)
    except Exception as error:
        if not is_damage(error):
            raise
        yield Batch([], [damaged(reader.where(), error)])


def first_records(file: SourceFile, most: int, keys: frozenset[str] | None = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield the records in the first mebibyte of a file, or the first items of its array, each with its place.

    What is no record is passed over, and so are lines that give one of `keys` twice: the readers report it.
    """
    try:
        with open_content(file, 0, BLOCK) as stream:
            if holds_array(file, stream):
                items = islice(array_items(stream, min(most, BLOCK)), _FIRST_ITEMS)
                yield from ((f"{file.location}:item {number}", item) for number, item in enumerate(items, 1))
                return
            # The last line of a short file has no end, and comes by itself.
            blocks = islice(_line_blocks(stream, 0, BLOCK, most), 1 if file.bytes > BLOCK else 2)
            lines = [line for _, block in blocks for line in block]
    except Exception as error:
        if isinstance(error, HeadwayError) or not (is_damage(error) or isinstance(error, ItemTooLongError)):
            raise
        return
    for number, line in enumerate(lines, 1):
        if not isinstance(line, LongLine):
            with suppress(BadRecordError):
                yield f"{file.location}:{number}", load_record(bytes(line).removeprefix(BOM), keys)


def begins_with_field(file: SourceFile, field: str) -> bool:
    """Return whether the first line of a local file is a record with a field; if not, `first_records` tells more.

    It reads little: all files of a source are asked, at every preparation.
    """
    from orjson import loads

    if not file.local or file.compression:
        return False
    try:
        with open_regular(file.path, buffering=0) as stream:
            line, end, _ = stream.read(_TAIL).removeprefix(BOM).partition(b"\n")
        record = loads(line) if end else None
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and field in record


def first_complaint(file: SourceFile, field: str, template: str | None, most: int) -> BadDocument | None:
    """Return what is wrong with the first record, if no record in the first mebibyte has the needed fields."""
    text_of = text_getter(field, template)
    first = None
    for where, record in first_records(file, most, keys_of_text(field, template)):
        try:
            text_of(record)
            return None
        except MissingFieldError as error:
            first = first or BadDocument(where, str(error))
        except BadRecordError:
            continue
    return first


def must_be_whole(file: SourceFile) -> bool:
    """Return whether a file cannot be cut at its line ends: it is one array, or not in UTF-8."""
    try:
        with open_content(file, 0, BLOCK) as stream:
            return is_transcoded(stream) or holds_array(file, stream)
    except Exception as error:
        if not is_damage(error):
            raise
        return False


def damaged(where: str, error: BaseException) -> BadDocument:
    """Return the bad document for the rest of a file that cannot be read."""
    fix = error.fix if isinstance(error, ContentError) else None
    reason = str(error) if fix is not None else f"the file cannot be read from here on: {error}"
    return BadDocument(where, reason, rest=True, fix=fix)


def _line_blocks(stream: BinaryIO, start: int, end: int | None, most: int) -> Iterator[tuple[int, list[Line]]]:
    """Yield the lines that begin in [start, end), without line ends, in groups with the position of the first line."""
    position = _seek_line(stream, start, end)
    if position is None:
        return
    reader = BlockReader(stream)
    left = None if end is None else end - position
    open_line = _OpenLine(most)
    while block := reader.read(_next_size(left)):
        if left is None or left >= len(block):
            lines, done = _ended_lines(block, len(block))
            rest = block[done:]
        else:
            # The last line of the range begins before byte `left` and ends at the first line end from there on.
            lines, done = _ended_lines(block, block.find(b"\n", max(0, left - 1)) + 1)
            rest = b"" if done else block
        if lines:
            if open_line.size:
                passed, first = open_line.end(lines[0])
                lines[:1] = [first] if first is not None else []
                position += passed
            if most < BLOCK:  # a line above the limit can fit into a block
                lines = [LongLine(len(line)) if len(line) > most else line for line in lines]
            if lines:
                yield position, lines
                position += sum(map(len, lines)) + len(lines)
        if rest:
            open_line.add(rest)
            if open_line.is_endless():
                yield position, [open_line.report()]
        if left is not None and end is not None:
            left -= len(block)
            if left <= 0 and position >= end:
                return
    if open_line.size:
        passed, last = open_line.end(b"")
        if last is not None:
            yield position + passed, [last]


class _OpenLine:
    """A line whose end has not been read yet. Only the length of a line above the limit is kept.

    Args:
        most: Size limit of a line in bytes.

    Attributes:
        size: Bytes so far; 0 if no line is open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[Line] = []
        self.size = 0
        self._reported = False

    def add(self, part: bytes) -> None:
        """Add bytes that do not contain the end of the line."""
        self.size += len(part)
        if self.size <= self._most:
            self._parts.append(part)
        else:
            self._parts.clear()

    def is_endless(self) -> bool:
        """Return whether the line is so long that it should be reported before its end is found."""
        return not self._reported and self.size > _COUNTED * self._most

    def report(self) -> LongLine:
        """Return the placeholder of the line, and remember that it was reported."""
        self._reported = True
        return LongLine(self.size, more=True)

    def end(self, part: Line) -> tuple[int, Line | None]:
        """Add the last bytes of the line, and reset for the next one.

        Returns:
            (0, line); or (bytes of the line with its end, None) if the line was already reported.
        """
        size = self.size + len(part)
        parts = [*self._parts, part]
        reported = self._reported
        self._parts = []
        self.size = 0
        self._reported = False
        if reported:
            return size + 1, None
        return 0, LongLine(size) if size > self._most else b"".join(parts)  # type: ignore[arg-type]


def _ended_lines(block: bytes, end: int) -> tuple[list[Line], int]:
    """Return the lines that end in the first `end` bytes, and the start of the next line."""
    view = memoryview(block)
    find = block.find
    start = 0
    lines: list[Line] = []
    while (at := find(b"\n", start, end)) >= 0:
        lines.append(view[start:at])
        start = at + 1
    return lines, start


def _next_size(left: int | None) -> int:
    """Return the bytes to read next; few after the span, where only the end of the last line is needed."""
    return BLOCK if left is None else min(BLOCK, left) if left > 0 else _TAIL


def _seek_line(stream: BinaryIO, start: int, end: int | None) -> int | None:
    """Seek to the first line that begins at or after byte `start`.

    Returns:
        Its position, or None if it does not begin before `end`.
    """
    if start == 0:
        return 0
    stream.seek(start - 1)
    position = start - 1
    while end is None or position < end:
        # Read in blocks, since the line may be larger than memory.
        block = stream.readline(BLOCK)
        position += len(block)
        if not block:
            return None
        if block.endswith(b"\n"):
            return position if end is None or position < end else None
    return None


class _LineReader:
    """Converts the lines of one piece to batches, and finds a line's number when a message needs it."""

    def __init__(self, piece: Piece) -> None:
        field = piece.field
        template = piece.template
        self._file = piece.file
        self._field = field
        self._most = piece.most
        self._text_of = text_getter(field, template)
        self._text_of_orjson = text_getter(field, template, by_orjson=True)
        self._plain = template is None and "." not in field
        self._keys = keys_of_text(field, template)
        self._is_key = None if self._keys is None else _pattern_of(self._keys)
        self._all_sound = True
        self._first = 0
        self._before: int | None = None  # lines before the piece; counted only when a message needs it
        self._done = 0  # lines of earlier blocks
        self._position = 0  # the present block
        self._lines: list[Line] = []

    def batch(self, position: int, lines: list[Line]) -> Batch:
        """Return the batch of some lines, the first of which begins at byte `position`."""
        if not self._lines:
            self._first = position
        if position == 0 and not isinstance(lines[0], LongLine):
            # Do not change the caller's list: the caller still counts the bytes of its lines.
            lines = [bytes(lines[0]).removeprefix(BOM), *lines[1:]]
        self._done += len(self._lines)
        self._position = position
        self._lines = lines
        return self._read_fields() if self._plain else self._read_records()

    def _read_fields(self) -> Batch:
        from orjson import loads

        field = self._field
        if self._all_sound:
            # Assume sound lines until one is not: this makes the loop a third faster.
            try:
                texts = [loads(line)[field] for line in self._lines]  # type: ignore[arg-type]
            except (ValueError, LookupError, TypeError):
                texts = []
            if not (texts and all(texts) and set(map(type, texts)) == _ONLY_TEXT):
                self._all_sound = False
            elif self._all_give_keys_once():
                return Batch(texts)
        batch = Batch([])
        for number, line in enumerate(self._lines):
            try:
                text = loads(line)[field]  # type: ignore[arg-type]
            except (ValueError, LookupError, TypeError):
                # The line is blank or malformed, lacks the field, or only `json` can parse it.
                text = ""
            if text and type(text) is str and self._gives_keys_once(line):
                batch.texts.append(text)
            else:
                self._read_slowly(line, number, batch)
        return batch

    def _read_records(self) -> Batch:
        from orjson import loads

        batch = Batch([])
        text_of = self._text_of_orjson
        for number, line in enumerate(self._lines):
            record = None
            text = ""
            with suppress(ValueError, BadRecordError):
                record = loads(line)  # type: ignore[arg-type]
                text = text_of(record)
            if text and self._gives_keys_once(line, record):
                batch.texts.append(text)
            else:
                self._read_slowly(line, number, batch)
        return batch

    def _all_give_keys_once(self) -> bool:
        """Return whether it is certain that each line gives each key once from which text is made."""
        # The first line may be as large as memory allows, and is not copied; the others are of one block.
        first, *others = self._lines
        return self._gives_keys_once(first) and self._gives_keys_once(b"\n".join(others), lines=len(others))  # type: ignore[arg-type]

    def _gives_keys_once(self, content: Any, record: Any = None, *, lines: int = 1) -> bool:
        """Return whether it is certain that a line gives each key once from which text is made.

        Args:
            content: The line, or several.
            record: The record of the line, for text that is made from all of it.
            lines: The number of lines.
        """
        if self._is_key is None or self._keys is None:
            return _quotes(bytes(content)) == 2 * _strings_in(record)
        return len(self._is_key.findall(content)) == lines * len(self._keys)

    def _read_slowly(self, line: Line, number: int, batch: Batch) -> None:
        """Parse a line with `json`, and add its text or a bad document to the batch."""
        if isinstance(line, LongLine):
            batch.add(too_large(self.where(number), "line", line.size, self._most, more=line.more))
            return
        line = bytes(line)
        if line and not line.isspace():
            try:
                batch.add(self._text_of(load_record(line, self._keys)))
            except BadRecordError as error:
                batch.add(BadDocument(self.where(number), str(error)))

    def where(self, number: int | None = None) -> str:
        """Return the place of a line of the present block; by default, of the line after the block."""
        number = len(self._lines) if number is None else number
        if not self._file.local and self._first > _COUNTED_REMOTELY:
            byte = self._position + sum(len(line) + 1 for line in self._lines[:number])
            return f"{self._file.location}:byte {byte:,}"
        if self._before is None:
            self._before = _lines_before(self._file, self._first)
        return f"{self._file.location}:{self._before + self._done + number + 1}"


def keys_of_text(field: str, template: str | None) -> frozenset[str] | None:
    """Return the keys from which the text of a record is made; None if any may be, as in a conversation."""
    if template in LAYOUTS:
        return None
    fields = [field] if template is None else template_fields(template)
    return frozenset(key for name in fields for key in name.split("."))


def _pattern_of(keys: frozenset[str]) -> re.Pattern[bytes]:
    written = {json.dumps(key, ensure_ascii=is_escaped) for key in keys for is_escaped in (False, True)}
    spelled = map(re.escape, sorted(written))
    return re.compile(f"(?:{'|'.join(spelled)})\\s*:".encode("utf-8", "surrogatepass"))


def _quotes(content: bytes) -> int:
    """Count the quotes of a JSON text that begin or end a string."""
    content = content.replace(b"\\\\", b"")
    return content.count(b'"') - content.count(b'\\"')


def _strings_in(value: Any) -> int:
    """Count the strings of a JSON value, keys among them."""
    found = 0
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            found += len(value)
            open_values += value.values()
        elif isinstance(value, list):
            open_values += value
        else:
            found += isinstance(value, str)
    return found


def load_record(line: bytes, keys: frozenset[str] | None) -> Any:
    """Parse a line with `json`.

    Args:
        line: The line.
        keys: The keys that may be given only once in an object (`keys_of_text`); all if None.

    Raises:
        BadRecordError: It is no JSON object, or gives such a key twice.
    """
    repeated: list[str] = []

    def noting_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated.extend(key for key in repeated_keys(pairs) if keys is None or key in keys)
        return found

    # A file that holds one array is a common mistake, which the parser's message does not explain.
    hint = "; an array is read from a file named .json, or as lines: jq -c '.[]'" if line.lstrip()[:1] == b"[" else ""
    try:
        record = json.loads(line.decode(), object_pairs_hook=noting_repeated)
    except UnicodeDecodeError as error:
        raise BadRecordError(not_utf8(line, error)) from None
    except (ValueError, RecursionError) as error:
        raise BadRecordError(f"not valid JSON: {error}{hint}") from None
    if not isinstance(record, dict):
        raise BadRecordError(f"holds {type(record).__name__}, not a JSON object{hint}")
    if repeated:
        raise BadRecordError(given_twice(repeated[0]))
    return record


def not_utf8(data: bytes, error: UnicodeDecodeError) -> str:
    """Describe why bytes are not valid UTF-8."""
    return f"not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}"


# Bytes and line ends counted so far in recently read files. Pieces of a file come in order, so the count continues
# instead of starting again for every bad line.
_counted: dict[tuple[str, str | None], tuple[int, int]] = {}


def _lines_before(file: SourceFile, offset: int) -> int:
    """Count the line ends in the first `offset` bytes of an uncompressed file."""
    key = (file.location, stamp_of(file) if file.local else file.version)
    position, count = _counted.get(key, (0, 0))
    if position > offset:
        position = 0
        count = 0
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

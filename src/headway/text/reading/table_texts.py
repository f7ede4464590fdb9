"""Conversion of Arrow record batches to texts, for all table formats.

A batch is validated before any offset in it is followed: an offset outside its buffer would crash the process. Only the
needed columns, and the needed fields of nested columns, are validated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.template import CHAT
from headway.core.errors import DataError, needing
from headway.core.format import counted, format_bytes
from headway.text.reading.compression import is_damage
from headway.text.reading.conversations import check_layout
from headway.text.reading.documents import (
    UNPACKED,
    BadDocument,
    BadRecordError,
    Batch,
    TooLargeError,
    too_large,
)
from headway.text.reading.guessing import guessed_field
from headway.text.reading.json_lines import damaged
from headway.text.reading.pieces import Piece
from headway.text.reading.places import Place
from headway.text.reading.records import check_unique_name, missing_field, text_getter, wanted_fields

# Rows and bytes converted at a time: few enough for memory even if documents are long.
ROWS = 1024
BATCH_BYTES = 2**20

# Levels of lists and structs in a column of conversations, and elements of the lists of a record batch.
_DEPTH = 16
_ELEMENTS = 2**24

Span = tuple[int, int]
Lengths = NDArray[np.int64]


class UnsoundError(ValueError):
    """A table is invalid; the message says why."""


@dataclass(frozen=True)
class Part:
    """A run of rows that is read as a unit."""

    read: Callable[[], Any] | None
    """Returns the `pyarrow.RecordBatch`; None for a part that is read together with others."""
    name: str = "a batch"
    rows: int = 0
    """Rows according to its header."""
    unpacked: int = 0
    """Unpacked bytes that its compressed buffers declare."""


def repair(file: Place) -> str:
    """Return the fix for a file that cannot be read."""
    pattern = PurePosixPath(file.name).name
    return f"repair it, or leave it out of data.sources (of a folder or glob by exclude: [{json.dumps(pattern)}])"


def given(table: Any) -> Part:
    """Return a part for a table that has already been read."""
    return Part(lambda: table)


def texts_of(parts: Iterator[Part], texts: TableTexts) -> Iterator[Batch]:
    """Yield the texts of a table's parts.

    A damaged part counts as a malformed document, and the parts after it are read. If they cannot be located, the rest
    of the file is one malformed document.
    """
    most = UNPACKED * texts.most
    while True:
        try:
            part = next(parts, None)
            if part is None:
                return
            if part.unpacked > most:
                reason = str(TooLargeError(f"{part.name} unpacks to {format_bytes(part.unpacked)}", most))
                yield Batch([], [BadDocument(texts.place, reason, rest=part.read is None, too_large=True)])
                if part.read is None:
                    return
                texts.rows += part.rows
                continue
            if part.read is None:
                continue
            table = part.read()
        except TooLargeError as error:
            yield Batch([], [BadDocument(texts.place, str(error), rest=True, too_large=True)])
            return
        except Exception as error:
            if not is_fault_of_file(error):
                raise
            yield Batch([], [damaged(texts.place, error)])
            return
        try:
            yield from texts.batches(table)
        except UnsoundError as error:
            reason = f"{part.name} ({counted(table.num_rows, 'row')}) is damaged: {error}"
            yield Batch([], [BadDocument(texts.place, reason)])
            texts.rows += table.num_rows


def is_fault_of_file(error: Exception) -> bool:
    """Return whether an error comes from the content of a file, not from the disk or a server."""
    import pyarrow as arrow

    # The library has its own errors and lets some of Python's through, for example for names that are not UTF-8.
    kinds = (arrow.ArrowException, ValueError, TypeError, LookupError, OverflowError, SystemError)
    return isinstance(error, kinds) or is_damage(error)


def columns_for(schema: Any, field: str, template: str | None, where: str) -> list[str]:
    """Return the columns that form a document's text, with dots between the levels of nested ones.

    Raises:
        DataError: a column does not exist, or holds no text.
    """
    import pyarrow as arrow

    if template == CHAT:
        return _columns_of_conversations(schema, where)
    columns = wanted_fields(field, template)
    for column in columns:
        kind = _type_of(schema, column, where)
        if arrow.types.is_run_end_encoded(kind):  # a few bytes of it may stand for any amount of text
            what = f"column '{column}' holds {kind}, which is not read"
            raise DataError(what, where=where, fix="write it plain: pyarrow.compute.run_end_decode(column)")
        if not (_is_text(kind) or (template is not None and _is_plain(kind))):
            many = ", which has no unique text form" if template is not None else ", not text"
            fix = "name columns of text in the template" if template is not None else "set the source's field"
            raise DataError(f"column '{column}' holds {kind}{many}", where=where, fix=fix)
    return columns


def field_of(schema: Any, field: str) -> str:
    """Return the column of a table's text: the given one, or another one where that is missing and plain."""
    return guessed_field({column.name: _is_text(column.type) for column in schema}) or field


def _columns_of_conversations(schema: Any, where: str) -> list[str]:
    """Return the columns that form a conversation; those of a layout must exist."""
    columns = wanted_fields("", CHAT, schema.names)
    check_layout(columns, schema.names, where)
    for column in columns:
        check_unique_name(column, schema.names, where)
        if not _is_nested_text(schema.field(column).type):
            what = f"column '{column}' holds {schema.field(column).type}, not lists and structs of text"
            raise DataError(what, where=where, fix="write it as JSON Lines, or leave the column out")
    return columns


def _is_nested_text(kind: Any, depth: int = 0) -> bool:
    """Return whether a type holds text and numbers only, at any depth that a conversation may have."""
    import pyarrow as arrow

    if arrow.types.is_struct(kind):
        names = [part.name for part in kind]
        inner = [part.type for part in kind]
        return len(set(names)) == len(names) and depth < _DEPTH and all(_is_nested_text(i, depth + 1) for i in inner)
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        return depth < _DEPTH and _is_nested_text(kind.value_type, depth + 1)
    return (_is_text(kind) and not isinstance(kind, arrow.BaseExtensionType)) or _is_plain(kind)


def _type_of(schema: Any, column: str, where: str) -> Any:
    kind = schema
    above = ""
    known = list(schema.names)
    for name in _levels(schema, column):
        names = _names(kind)
        check_unique_name(name, names, where)
        if name not in names:
            raise missing_field(column, known, where)
        kind = kind.field(name).type
        above = f"{above}{name}."
        known += [f"{above}{there}" for there in _names(kind)]
    return kind


def _levels(schema: Any, column: str) -> list[str]:
    """Split a column into the names of its levels, as `records` does: a field with the name of the whole rest wins."""
    kind = schema
    rest = column
    levels: list[str] = []
    while True:
        names = _names(kind)
        head, dot, tail = rest.partition(".")
        if rest in names or not dot or head not in names:
            return [*levels, rest]
        levels.append(head)
        if names.count(head) > 1:
            return levels  # ambiguous, which is an error
        kind = kind.field(head).type
        rest = tail


def _names(kind: Any) -> list[str]:
    """Return the names of the fields of a schema or a nested type; none for any other type."""
    import pyarrow as arrow

    return [part.name for part in kind] if isinstance(kind, arrow.Schema) or arrow.types.is_struct(kind) else []


def _is_text(kind: Any) -> bool:
    """Return whether a type holds text. Many writers declare it as bytes; whether these are UTF-8 shows on reading."""
    import pyarrow as arrow

    kind = _stored(kind)
    if arrow.types.is_dictionary(kind):
        kind = _stored(kind.value_type)
    return bool(arrow.types.is_null(kind)) or any(kind in pair for pair in _layouts())


def _stored(kind: Any) -> Any:
    """Return the type in which an extension type such as JSON is stored; other types unchanged."""
    import pyarrow as arrow

    return kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind


def _is_plain(kind: Any) -> bool:
    import pyarrow as arrow

    return any(test(kind) for test in (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean))


class TableTexts:
    """Converter of a table's batches to texts.

    Args:
        piece: A part of the table; `piece.most` limits the bytes of a row's text columns.
        where: Returns the place of a row, given its number among all rows read.
    """

    def __init__(self, piece: Piece, where: Callable[[int], str]) -> None:
        self.most = piece.most
        self._where = where
        self._field = piece.field if piece.template is None else None
        self._text_of = text_getter(piece.field, piece.template)
        self._wanted = piece.field, piece.template
        self.rows = 0
        """Rows so far."""

    def batches(self, table: Any) -> Iterator[Batch]:
        """Yield the texts of a record batch, some rows at a time.

        Raises:
            UnsoundError: the batch is invalid; none of its rows is counted.
        """
        columns = sound_columns(table, wanted_fields(*self._wanted, table.schema.names))
        lengths = sum((_text_bytes(column) for column in columns.values()), np.zeros(table.num_rows, np.int64))
        alone = columns.get(self._field) if self._field is not None else None
        for start, end in _slices(lengths, self.most):
            if lengths[start] > self.most:
                size = int(lengths[start])
                yield Batch([], [too_large(self._where(self.rows), "row", size, self.most)])
            elif alone is not None:
                yield self._column(alone.slice(start, end - start))
            else:
                yield self._records({name: column.slice(start, end - start) for name, column in columns.items()})
            self.rows += end - start

    @property
    def place(self) -> str:
        """Place of the next row."""
        return self._where(self.rows)

    def _column(self, column: Any) -> Batch:
        """Return the texts of a column; row by row if some are not valid UTF-8."""
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:
            assert self._field is not None
            return self._records({self._field: column})
        batch = Batch([value for value in values if value])
        if len(batch.texts) < len(values):
            texts = list(accumulate(map(bool, values)))
            batch.empty.update(after for value, after in zip(values, texts, strict=True) if value == "")
            reason = f"field '{self._field}' holds null, not text"
            batch.bad = [
                BadDocument(self._where(self.rows + number), reason, after)
                for number, (value, after) in enumerate(zip(values, texts, strict=True))
                if value is None
            ]
        return batch

    def _records(self, columns: Mapping[str, Any]) -> Batch:
        batch = Batch([])
        for number in range(len(next(iter(columns.values())))):
            try:
                batch.add(self._text_of({name: column[number].as_py() for name, column in columns.items()}))
            except UnicodeDecodeError as error:
                reason = f"not valid UTF-8 at offset {error.start:,}"
                batch.add(BadDocument(self._where(self.rows + number), reason))
            except BadRecordError as error:
                batch.add(BadDocument(self._where(self.rows + number), str(error)))
        return batch


def sound_columns(table: Any, fields: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a record batch that hold the given fields, by name, pruned to these fields.

    Their offsets are validated. Invalid UTF-8 shows only when text is read.

    Raises:
        UnsoundError: the batch is invalid.
    """
    import pyarrow as arrow

    wanted = _tree(fields, table.schema)
    try:
        table.validate()
        columns = {name: _pruned(table.column(name), tree) for name, tree in wanted.items()}
        for column in columns.values():
            check_sound(column)
        # A view of lists can lose their elements: of nulls, which have no buffer, it cannot tell the number.
        kinds = {name: _replaced(column.type, _layouts()) for name, column in columns.items()}
        columns = {n: column if column.type == kinds[n] else column.view(kinds[n]) for n, column in columns.items()}
    except arrow.ArrowException as error:
        raise UnsoundError(str(error)) from None
    return columns


_Tree = dict[str, "_Tree"]


def _tree(fields: Sequence[str], schema: Any) -> _Tree:
    """Return the needed columns, each with the needed fields inside it; an empty tree stands for all fields."""
    tree: _Tree = {}
    for field in fields:
        below = tree
        for name in _levels(schema, field):
            below = below.setdefault(name, {})
    return tree


def check_sound(array: Any) -> None:
    """Validate the offsets of an array. Invalid UTF-8 shows only when text is read.

    Raises:
        ArrowException: an offset lies outside its buffer.
    """
    array.validate()
    unchecked = _replaced(array.type, [(text, binary) for binary, text in _layouts()])
    # Validation of all text as UTF-8 would take a third of the reading time, so validate text as bytes.
    (array if unchecked == array.type else array.view(unchecked)).validate(full=True)


def _layouts() -> list[tuple[Any, Any]]:
    """Return each type of bytes with the type of text that has the same memory layout."""
    import pyarrow as arrow

    return [
        (arrow.binary(), arrow.string()),
        (arrow.large_binary(), arrow.large_string()),
        (arrow.binary_view(), arrow.string_view()),
    ]


def _replaced(kind: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return a type in which the second of each pair of types stands for the first, at any depth outside lists."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _replaced(kind.value_type, pairs), kind.ordered)
    if arrow.types.is_struct(kind):
        return arrow.struct([part.with_type(_replaced(part.type, pairs)) for part in kind])
    return next((other for one, other in pairs if kind == one), kind)


def _pruned(array: Any, tree: _Tree) -> Any:
    """Return a nested column with only the needed fields; others may hold values that Python cannot represent."""
    import pyarrow as arrow

    if not tree:
        return array.storage if isinstance(array, arrow.ExtensionArray) else array
    parts = {name: _pruned(array.field(array.type.get_field_index(name)), below) for name, below in tree.items()}
    fields = [arrow.field(name, part.type) for name, part in parts.items()]
    return arrow.StructArray.from_arrays(list(parts.values()), fields=fields, mask=array.is_null())


def _text_bytes(array: Any) -> Lengths:
    """Return the bytes of text in each row of a valid column, (rows,)."""
    import pyarrow as arrow

    types = arrow.types
    kind = array.type
    if types.is_struct(kind):
        parts = (_text_bytes(array.field(number)) for number in range(kind.num_fields))
        return sum(parts, np.zeros(len(array), np.int64))
    if types.is_list(kind) or types.is_large_list(kind):
        ends = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        if len(array.values) > _ELEMENTS or ends[-1] > len(array.values):
            raise UnsoundError(f"its lists have {max(len(array.values), int(ends[-1])):,} elements")
        # An element counts even if it is empty: a list of nulls can be far longer than its file.
        before = np.concatenate([[0], np.cumsum(_text_bytes(array.values) + 1)])
        return np.asarray(np.diff(before[ends]), dtype=np.int64)
    if types.is_dictionary(kind):
        of_values = np.append(_text_bytes(array.dictionary), 0)
        places = array.indices.cast(arrow.int64()).fill_null(len(array.dictionary))
        lengths: Lengths = of_values[places.to_numpy(zero_copy_only=False)]
        return lengths
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)) or not len(array):
        return np.zeros(len(array), np.int64)
    places = array.buffers()[1]
    start = array.offset
    end = array.offset + len(array)
    if types.is_string_view(kind):
        # Each row has 16 bytes; the first four are the length.
        lengths = np.frombuffer(places, "<i4", 4 * end).reshape(-1, 4)[start:, 0].astype(np.int64)
    else:
        offsets = np.frombuffer(places, "<i4" if types.is_string(kind) else "<i8", end + 1)
        lengths = np.diff(offsets[start:]).astype(np.int64)
    # Lengths of null rows are undefined.
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0) if array.null_count else lengths


def _slices(lengths: Lengths, most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that fit into memory; each row above the size limit is a run of its own."""
    totals = np.cumsum(lengths)
    large = [*np.flatnonzero(lengths > most).tolist(), len(lengths)]
    start = following = 0
    while start < len(lengths):
        while large[following] < start:
            following += 1
        if large[following] == start:
            end = start + 1
        else:
            before = int(totals[start] - lengths[start])
            enough = int(np.searchsorted(totals, before + BATCH_BYTES)) + 1
            end = min(enough, start + ROWS, large[following])
        yield start, end
        start = end


def grouped(sizes: Sequence[int], wanted: int) -> Iterator[tuple[int, int, int]]:
    """Join consecutive parts until they have `wanted` bytes; yield first, end (exclusive), bytes."""
    start = 0
    before = 0
    for end, total in enumerate(accumulate(sizes), 1):
        if total - before >= wanted or end == len(sizes):
            yield start, end, total - before
            start = end
            before = total


def import_pyarrow(file: Place) -> Any:
    """Import `pyarrow`.

    Raises:
        ConfigError: it is not installed.
    """
    with needing("pyarrow", "parquet", f"reading {file.name}"):
        import pyarrow as arrow
        import pyarrow.ipc
    return arrow

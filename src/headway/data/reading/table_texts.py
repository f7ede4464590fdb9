"""From tables in memory (batches of Arrow's records, wherever they were read) to texts.

What a batch says of itself is checked before anything in it is followed: an offset that leads out of its buffer would
end the process. Only the columns that are wanted are looked at, and of nested ones only what is wanted inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError, missing_extra
from headway.core.format import counted, format_bytes
from headway.data.reading.compression import is_damage
from headway.data.reading.documents import UNPACKED, BadDocument, Batch, TooLargeError, too_large
from headway.data.reading.json_lines import damaged
from headway.data.reading.places import Place
from headway.data.reading.records import BadRecordError, check_unique_name, missing_field, text_getter, wanted_fields

# Rows that become texts at once: little enough for memory when documents are long.
ROWS, BATCH_BYTES = 1024, 2**20

#: What to do about a file that nobody can read.
REPAIR = "repair it, or leave it out of data.sources"

Span = tuple[int, int]
Lengths = NDArray[np.int64]


class UnsoundError(ValueError):
    """A table is not what its kind says; the message says why."""


@dataclass(frozen=True)
class Part:
    """A run of rows that is read at once."""

    read: Callable[[], Any] | None
    """Gives the `pyarrow.RecordBatch`; None for what is not read by itself, but with others."""
    name: str = "a batch"
    rows: int = 0
    """Rows, by what its header says."""
    unpacked: int = 0
    """Bytes that its compressed parts unpack to, by what they say."""


def given(table: Any) -> Part:
    """Return the part that has been read already."""
    return Part(lambda: table)


def texts_of(parts: Iterator[Part], texts: TableTexts) -> Iterator[Batch]:
    """Yield the texts of a table's parts. One that is not what it should be is a malformed document, and the ones
    behind it are read; where it cannot be told what follows, the rest is."""
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
    """Whether what is in a file has had the library raise an error; not the disk, nor a server."""
    import pyarrow as arrow

    # It has errors of its own, and lets some of Python's through, about names that are no UTF-8 for one.
    kinds = (arrow.ArrowException, ValueError, TypeError, LookupError, OverflowError, SystemError)
    return isinstance(error, kinds) or is_damage(error)


def columns_for(schema: Any, field: str, template: str | None, where: str) -> list[str]:
    """The columns (dots between the levels of nested ones) that a document's text is made of.

    Raises:
        DataError: there is no such column, or it holds no text.
    """
    columns = wanted_fields(field, template)
    for column in columns:
        kind = _type_of(schema, column, where)
        if not (_is_text(kind) or (template is not None and _is_plain(kind))):
            many = ", which has no one text form" if template is not None else ", not text"
            fix = "name columns of text in the template" if template is not None else "set the source's field"
            raise DataError(f"column '{column}' holds {kind}{many}", where=where, fix=fix)
    return columns


def _type_of(schema: Any, column: str, where: str) -> Any:
    import pyarrow as arrow

    check_unique_name(column, schema.names, where)
    if column in schema.names:
        return schema.field(column).type
    head, *tail = column.split(".")
    if head not in schema.names:
        raise missing_field(column, schema.names, where)
    check_unique_name(head, schema.names, where)
    kind = schema.field(head).type
    for name in tail:
        names = [part.name for part in kind] if arrow.types.is_struct(kind) else []
        if name not in names:
            raise missing_field(column, [*schema.names, *(f"{head}.{there}" for there in names)], where)
        check_unique_name(name, names, where)
        kind, head = kind.field(name).type, f"{head}.{name}"
    return kind


def _is_text(kind: Any) -> bool:
    import pyarrow as arrow

    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    tests = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view, arrow.types.is_null)
    return any(test(kind) for test in tests)


def _is_plain(kind: Any) -> bool:
    import pyarrow as arrow

    return any(test(kind) for test in (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean))


class TableTexts:
    """Makes texts of a table's batches.

    Args:
        field: The column that holds the text.
        template: Makes it of several columns instead.
        most: Bytes that the text columns of a row may have.
        where: The place of a row, given its number among all that are read.
    """

    def __init__(self, field: str, template: str | None, most: int, where: Callable[[int], str]) -> None:
        self.most, self._where = most, where
        self._field = field if template is None else None
        self._text_of = text_getter(field, template)
        self._fields = wanted_fields(field, template)
        self.rows = 0
        """Rows so far."""

    def batches(self, table: Any) -> Iterator[Batch]:
        """Yield the texts of a record batch, some rows at a time.

        Raises:
            UnsoundError: it holds what cannot be; no row of it is counted.
        """
        columns = sound_columns(table, self._fields)
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
        """Where the next row is."""
        return self._where(self.rows)

    def _column(self, column: Any) -> Batch:
        """The texts of a column; row by row where some are no UTF-8."""
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
    """Return the columns of a record batch that hold some fields, with nothing else in them, by name. Nothing in them
    leads out of them; whether text is UTF-8 shows when it is read.

    Raises:
        UnsoundError: it holds what cannot be.
    """
    import pyarrow as arrow

    wanted = _tree(fields, table.schema.names)
    try:
        table.validate()
        columns = {name: _pruned(table.column(name), tree) for name, tree in wanted.items()}
        for column in columns.values():
            check_sound(column)
    except arrow.ArrowException as error:
        raise UnsoundError(str(error)) from None
    return columns


_Tree = dict[str, "_Tree"]


def _tree(fields: Sequence[str], columns: Sequence[str]) -> _Tree:
    """The columns that are wanted, each with what is wanted inside it; all of it where that is nothing."""
    tree: _Tree = {}
    for field in fields:
        below = tree
        for name in [field] if field in columns else field.split("."):
            below = below.setdefault(name, {})
    return tree


def check_sound(array: Any) -> None:
    """Refuse an array in which something leads out of it. Whether its text is UTF-8 shows when it is read.

    Raises:
        ArrowException: something does.
    """
    array.validate()
    unchecked = _without_text(array.type)
    # To look through all text for what is no UTF-8 would take a third of the time of reading it.
    (array if unchecked == array.type else array.view(unchecked)).validate(full=True)


def _without_text(kind: Any) -> Any:
    """A type with bytes in the place of text, at any depth: the same in memory."""
    import pyarrow as arrow

    types = arrow.types
    for test, bare in (
        (types.is_string, arrow.binary),
        (types.is_large_string, arrow.large_binary),
        (types.is_string_view, arrow.binary_view),
    ):
        if test(kind):
            return bare()
    if types.is_dictionary(kind):
        return arrow.dictionary(kind.index_type, _without_text(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return arrow.struct([part.with_type(_without_text(part.type)) for part in kind])
    return kind


def _pruned(array: Any, tree: _Tree) -> Any:
    """A nested column with only what is wanted of it: the rest may hold what Python cannot."""
    import pyarrow as arrow

    if not tree:
        return array
    parts = {name: _pruned(array.field(array.type.get_field_index(name)), below) for name, below in tree.items()}
    fields = [arrow.field(name, part.type) for name, part in parts.items()]
    return arrow.StructArray.from_arrays(list(parts.values()), fields=fields, mask=array.is_null())


def _text_bytes(array: Any) -> Lengths:
    """Bytes of text in each row of a sound column, (rows,)."""
    import pyarrow as arrow

    types, kind = arrow.types, array.type
    if types.is_struct(kind):
        parts = (_text_bytes(array.field(number)) for number in range(kind.num_fields))
        return sum(parts, np.zeros(len(array), np.int64))
    if types.is_dictionary(kind):
        of_values = np.append(_text_bytes(array.dictionary), 0)
        places = array.indices.cast(arrow.int64()).fill_null(len(array.dictionary))
        lengths: Lengths = of_values[places.to_numpy(zero_copy_only=False)]
        return lengths
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)) or not len(array):
        return np.zeros(len(array), np.int64)
    places, start, end = array.buffers()[1], array.offset, array.offset + len(array)
    if types.is_string_view(kind):
        # Each row has 16 bytes, of which the first four are the length.
        lengths = np.frombuffer(places, "<i4", 4 * end).reshape(-1, 4)[start:, 0].astype(np.int64)
    else:
        offsets = np.frombuffer(places, "<i4" if types.is_string(kind) else "<i8", end + 1)
        lengths = np.diff(offsets[start:]).astype(np.int64)
    # What stands there for null means nothing.
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0) if array.null_count else lengths


def _slices(lengths: Lengths, most: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that are few and short enough for memory; each row that is larger than it may be is one of its
    own."""
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
    """Consecutive parts joined until they have `wanted` bytes: first, end (exclusive), bytes."""
    start, before = 0, 0
    for end, total in enumerate(accumulate(sizes), 1):
        if total - before >= wanted or end == len(sizes):
            yield start, end, total - before
            start, before = end, total


def import_pyarrow(file: Place) -> Any:
    """The package `pyarrow`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.ipc
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"reading {file.name}") from None
    return arrow

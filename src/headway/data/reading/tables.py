"""Parquet files and Arrow's IPC files and streams to texts: only the columns that are wanted, a batch at a time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from headway.core.errors import DataError, missing_extra
from headway.data.reading.compression import is_damage
from headway.data.reading.documents import BadDocument, Batch
from headway.data.reading.json_lines import damaged
from headway.data.reading.places import SourceFile, open_file
from headway.data.reading.records import BadRecordError, missing_field, refuse_shared_name, text_getter, wanted_fields

Span = tuple[int, int]

# Rows that are decoded at once: little enough for memory when documents are long.
_ROWS, _BATCH_BYTES = 1024, 2**20
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3  # kinds of IPC messages, as in Arrow's Message.fbs
_REPAIR = "repair it, or leave it out of data.sources"


def parquet_spans(file: SourceFile, field: str, template: str | None, size: int) -> list[tuple[Span, int]]:
    """Ranges of row groups of at least `size` bytes, each with its share of the file's bytes.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no readable Parquet file, or has no such column of text.
    """
    with open_parquet(file) as parquet:
        columns_for(parquet.schema_arrow, field, template, file.location)
        groups = [parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)]
    total = max(1, sum(groups))
    return [((first, end), file.bytes * part // total) for first, end, part in _grouped(groups, size)]


def read_parquet(file: SourceFile, span: Span, field: str, template: str | None) -> Iterator[Batch]:
    """The texts of some row groups."""
    with open_parquet(file) as parquet:
        columns = columns_for(parquet.schema_arrow, field, template, file.location)
        facts = parquet.metadata
        rows_before = sum(facts.row_group(group).num_rows for group in range(span[0]))
        batches = parquet.iter_batches(
            batch_size=_rows_at_once(facts, span, columns),
            row_groups=range(*span),
            columns=columns,
            use_threads=False,
        )
        yield from _texts(batches, file, lambda: rows_before, field, template)


@contextmanager
def open_parquet(file: SourceFile) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, for the length of a block.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no readable Parquet file.
    """
    arrow = _pyarrow(file)
    import pyarrow.parquet as parquet

    if not file.ranges:
        what = "the server gives files from their beginning only, and a Parquet file is read from its end"
        raise DataError(what, where=file.location, fix="download it, and name the copy")
    with open_file(file) as stream:
        try:
            # Without `pre_buffer` and with a buffer a row group is read as a stream, however large it is.
            opened = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=file.location, fix=_REPAIR) from None
        with opened:
            yield opened


def _rows_at_once(facts: Any, span: Span, columns: Sequence[str]) -> int:
    """Rows that hold about a batch's bytes of text."""
    rows = size = 0
    for group in (facts.row_group(number) for number in range(*span)):
        rows += group.num_rows
        parts = (group.column(number) for number in range(group.num_columns))
        size += sum(part.total_uncompressed_size for part in parts if _below(part.path_in_schema, columns))
    return max(1, min(_ROWS, _BATCH_BYTES * rows // max(1, size)))


def _below(path: str, columns: Sequence[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def arrow_spans(file: SourceFile, field: str, template: str | None, size: int) -> list[tuple[Span | None, int]]:
    """Ranges of record batches of about `size` bytes, each with its bytes: numbers of batches in an IPC file, places in
    the file for a stream; None for all of a stream whose batches need what came before them (dictionaries).

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no readable Arrow file, or has no such column of text.
    """
    with _open_arrow(file) as (stream, reader):
        columns_for(reader.schema, field, template, file.location)
        if hasattr(reader, "num_record_batches"):
            count = reader.num_record_batches
            share = max(1, -(-count * size // max(1, file.bytes)))
            starts = range(0, count, share)
            return [
                ((first, min(first + share, count)), file.bytes * min(share, count - first) // count)
                for first in starts
            ]
        if not file.ranges or any(_has_dictionary(part.type) for part in reader.schema):
            return [(None, file.bytes)]
        messages = [(start, end) for kind, start, end in _messages(stream, file) if kind != _SCHEMA]
    if not messages:
        return []
    groups = _grouped([end - start for start, end in messages], size)
    return [((messages[first][0], messages[end - 1][1]), part) for first, end, part in groups]


def read_arrow(file: SourceFile, span: Span | None, field: str, template: str | None) -> Iterator[Batch]:
    """The texts of some record batches."""
    arrow = _pyarrow(file)
    with _open_arrow(file) as (stream, reader):
        schema = reader.schema
        columns = [name.split(".")[0] if name not in schema.names else name for name in wanted_fields(field, template)]
        places = sorted({schema.get_field_index(column) for column in columns})
        if hasattr(reader, "num_record_batches"):
            options = arrow.ipc.IpcReadOptions(included_fields=places)
            stream.seek(0)
            part = arrow.ipc.open_file(stream, options=options)
            first, end = span or (0, part.num_record_batches)
            batches: Iterator[Any] = (part.get_batch(number) for number in range(first, end))

            def rows_before() -> int:
                return sum(part.get_batch(number).num_rows for number in range(first))
        else:
            # A stream's batches have all columns; those that nobody wants may hold what Python cannot.
            whole = _batches_at(stream, schema, span) if span else iter(reader)
            batches = (_only(batch, places) for batch in whole)

            def rows_before() -> int:
                with _open_arrow(file) as (_, fresh):
                    return _rows_until(fresh, file, span)

        yield from _texts(_sliced(batches), file, rows_before, field, template)


def _only(batch: Any, places: Sequence[int]) -> Any:
    import pyarrow as arrow

    return arrow.RecordBatch.from_arrays(
        [batch.column(place) for place in places], schema=arrow.schema([batch.schema.field(place) for place in places])
    )


def _has_dictionary(kind: Any) -> bool:
    """Whether a type is a dictionary's, or has one at any depth."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind):
        return True
    kind = getattr(kind, "storage_type", kind)
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _batches_at(stream: Any, schema: Any, span: Span) -> Iterator[Any]:
    import pyarrow as arrow

    stream.seek(span[0])
    while stream.tell() < span[1]:
        yield arrow.ipc.read_record_batch(arrow.ipc.read_message(stream), schema)


def _rows_until(reader: Any, file: SourceFile, span: Span | None) -> int:
    """Rows of a stream before a place in it."""
    if span is None:
        return 0
    with open_file(file) as stream:
        before = sum(1 for kind, start, _ in _messages(stream, file) if kind == _RECORDS and start < span[0])
    return sum(reader.read_next_batch().num_rows for _ in range(before))


def _sliced(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of few enough rows for memory; slices are views."""
    for batch in batches:
        rows = max(1, min(_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


@contextmanager
def _open_arrow(file: SourceFile) -> Iterator[tuple[Any, Any]]:
    """An Arrow file's bytes, and a `pyarrow.ipc` reader on them, for the length of a block.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: it is neither an IPC file nor a stream.
    """
    arrow = _pyarrow(file)
    try:
        # A mapped file is not copied: its texts are made right from the page cache.
        stream = arrow.memory_map(file.location) if file.local else arrow.PythonFile(open_file(file), mode="r")
    except OSError as error:
        raise DataError(f"an input file cannot be read: {error}", where=file.location, fix=_REPAIR) from None
    with stream:
        try:
            is_file = file.ranges and bytes(stream.read(6)) == b"ARROW1"
            if file.ranges:
                stream.seek(0)
            reader = arrow.ipc.open_file(stream) if is_file else arrow.ipc.open_stream(stream)
        except (arrow.ArrowException, OSError, EOFError) as error:
            raise DataError(f"not a readable Arrow file: {error}", where=file.location, fix=_REPAIR) from None
        yield stream, reader


def _messages(stream: Any, file: SourceFile) -> Iterator[tuple[int, int, int]]:
    """Kind, start and end of each message of an IPC stream, from their headers alone (Arrow columnar format,
    "Encapsulated message format")."""
    position = 0
    while position < file.bytes:
        stream.seek(position)
        prefix = bytes(stream.read(8))
        if len(prefix) < 8:
            # Nothing whole can follow; whoever reads it says so.
            yield _RECORDS, position, file.bytes
            return
        mark, length = struct.unpack("<Ii", prefix)
        header = 8
        if mark != 0xFFFFFFFF:  # before Arrow 0.15
            length, header = mark, 4
            stream.seek(position + header)
        if length == 0:
            return
        kind, body = _message_facts(bytes(stream.read(length)), file, position)
        end = position + header + length + body
        yield kind, position, min(end, file.bytes)
        position = end


def _message_facts(metadata: bytes, file: SourceFile, position: int) -> tuple[int, int]:
    """Kind of a message and bytes of its body, out of the flatbuffer table `Message`."""
    try:
        (table,) = struct.unpack_from("<I", metadata, 0)
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        slots = struct.unpack_from("<HHHHHH", metadata, vtable)
        kind = metadata[table + slots[3]]
        body = struct.unpack_from("<q", metadata, table + slots[5])[0] if slots[0] > 10 and slots[5] else 0
    except (struct.error, IndexError):
        what = f"the Arrow stream is damaged at byte {position:,}"
        raise DataError(what, where=file.location, fix=_REPAIR) from None
    return kind, body


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

    refuse_shared_name(column, schema.names, where)
    if column in schema.names:
        return schema.field(column).type
    head, *tail = column.split(".")
    if head not in schema.names:
        raise missing_field(column, schema.names, where)
    kind = schema.field(head).type
    for name in tail:
        names = [part.name for part in kind] if arrow.types.is_struct(kind) else []
        if name not in names:
            raise missing_field(column, [*schema.names, *(f"{head}.{there}" for there in names)], where)
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


def _texts(
    batches: Iterator[Any], file: SourceFile, rows_before: Callable[[], int], field: str, template: str | None
) -> Iterator[Batch]:
    """Texts of record batches; `rows_before` tells how many rows come before them, when a row has to be named."""
    import pyarrow as arrow

    done = 0
    text_of = text_getter(field, template)

    def where(number: int) -> str:
        return f"{file.location}:row {rows_before() + done + number + 1}"

    try:
        for table in batches:
            yield _batch_of(table, field if template is None and field in table.schema.names else None, text_of, where)
            done += table.num_rows
    except (arrow.ArrowException, OSError, EOFError) as error:
        if not (isinstance(error, arrow.ArrowException) or is_damage(error)):
            raise
        yield Batch([], [damaged(where(0), error)])


def _batch_of(table: Any, column: str | None, text_of: Callable[[Any], str], where: Callable[[int], str]) -> Batch:
    """The batch for a table: of one column of text, or record by record."""
    batch = Batch([])
    if column is not None:
        try:
            values = table.column(column).to_pylist()
        except UnicodeDecodeError:
            values = None
        if values is not None:
            batch.texts = [value for value in values if value]
            if len(batch.texts) < len(values):
                texts = list(accumulate(map(bool, values)))
                batch.empty.update(after for value, after in zip(values, texts, strict=True) if value == "")
                batch.bad = [
                    BadDocument(where(number), f"field '{column}' holds null, not text", after)
                    for number, (value, after) in enumerate(zip(values, texts, strict=True))
                    if value is None
                ]
            return batch
    for number in range(table.num_rows):
        try:
            batch.add(text_of({name: table.column(name)[number].as_py() for name in table.schema.names}))
        except UnicodeDecodeError as error:
            batch.add(BadDocument(where(number), f"not valid UTF-8 at offset {error.start:,}"))
        except BadRecordError as error:
            batch.add(BadDocument(where(number), str(error)))
    return batch


def _grouped(sizes: Sequence[int], wanted: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive parts joined until they have `wanted` bytes: first, end (exclusive), bytes."""
    start, before = 0, 0
    for end, total in enumerate(accumulate(sizes), 1):
        if total - before >= wanted or end == len(sizes):
            yield start, end, total - before
            start, before = end, total


def _pyarrow(file: SourceFile) -> Any:
    try:
        import pyarrow as arrow
        import pyarrow.ipc
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"reading {file.name}") from None
    return arrow

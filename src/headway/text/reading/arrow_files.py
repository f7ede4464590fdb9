"""Reader of texts from Arrow IPC files and streams. It reads only the needed columns, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from headway.core.errors import DataError, HeadwayError
from headway.text.reading.arrow_messages import (
    RECORDS,
    SCHEMA,
    MalformedError,
    Message,
    file_blocks,
    message_at,
    stream_messages,
    unpacked_bytes,
)
from headway.text.reading.documents import Batch
from headway.text.reading.pieces import Piece
from headway.text.reading.places import Place, SourceFile, open_file
from headway.text.reading.records import wanted_fields
from headway.text.reading.table_texts import (
    Part,
    Span,
    TableTexts,
    columns_for,
    field_of,
    grouped,
    import_pyarrow,
    repair,
    texts_of,
)


def arrow_spans(
    file: SourceFile, field: str, template: str | None, size: int, may_differ: bool = False
) -> tuple[str, list[tuple[Span | None, int]]]:
    """Divide an Arrow file into ranges of record batches of about `size` bytes.

    Returns:
        The column of its text, and ranges with their bytes. A range holds batch numbers for an IPC file and byte
        offsets for a stream. It is None for a whole stream whose batches depend on earlier messages (dictionaries).

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is not a readable Arrow file, or has no such text column.
    """
    with open_arrow(file) as (stream, reader):
        if may_differ:
            field = field_of(reader.schema, field)
        columns_for(reader.schema, field, template, file.location)
        if hasattr(reader, "num_record_batches"):
            count = reader.num_record_batches
            share = max(1, -(-count * size // max(1, file.bytes)))
            starts = range(0, count, share)
            return field, [
                ((first, min(first + share, count)), file.bytes * min(share, count - first) // count)
                for first in starts
            ]
        if not file.ranges or any(_has_dictionary(part.type) for part in reader.schema):
            return field, [(None, file.bytes)]
        try:
            found = stream_messages(stream, 0, file.bytes, file.bytes)
            messages = [(message.start, message.end) for message in found if message.kind != SCHEMA]
        except MalformedError as error:
            raise DataError(f"the Arrow stream is damaged: {error}", where=file.location, fix=repair(file)) from None
    if not messages:
        return field, []
    groups = grouped([end - start for start, end in messages], size)
    return field, [((messages[first][0], messages[end - 1][1]), part) for first, end, part in groups]


def read_arrow(piece: Piece) -> Iterator[Batch]:
    """Yield the texts of some record batches. A row whose text has more than `piece.most` bytes is malformed."""
    file = piece.file
    span = piece.span
    with open_arrow(file) as (stream, reader):
        names = reader.schema.names
        fields = wanted_fields(piece.field, piece.template, names)
        columns = sorted({names.index(name if name in names else name.split(".")[0]) for name in fields})
        if hasattr(reader, "num_record_batches"):
            parts = _file_parts(file, span or (0, reader.num_record_batches), stream, columns)
        elif span is not None:
            parts = _stream_parts(file, span, stream, reader.schema, columns)
        else:
            parts = _whole_stream(file, stream, reader, columns)
        before = cache(partial(_rows_before, file, span))

        def where(row: int) -> str:
            known = before()
            return file.location if known is None else f"{file.location}:row {known + row + 1}"

        yield from texts_of(parts, TableTexts(piece, where))


def _file_parts(file: SourceFile, span: Span, stream: Any, columns: Sequence[int]) -> Iterator[Part]:
    """Yield record batches of an IPC file."""
    import pyarrow as arrow

    stream.seek(0)
    reader = arrow.ipc.open_file(stream, options=arrow.ipc.IpcReadOptions(included_fields=[*columns]))
    dictionaries, batches = file_blocks(stream, file.bytes)
    for offset in dictionaries:
        message = _message(stream, offset, file)
        yield Part(None, f"the dictionary at byte {offset:,}", 0, unpacked_bytes(stream, message))
    for number in range(*span):
        message = _message(stream, batches[number], file)
        read = partial(reader.get_batch, number)
        name = f"record batch {number:,}"
        yield Part(read, name, message.rows, unpacked_bytes(stream, message))


def _message(stream: Any, offset: int, file: SourceFile) -> Message:
    message = message_at(stream, offset, file.bytes)
    if message is None:
        raise MalformedError(f"there is no message at byte {offset:,}")
    return message


def _stream_parts(file: SourceFile, span: Span, stream: Any, schema: Any, columns: Sequence[int]) -> Iterator[Part]:
    """Yield record batches of an IPC stream without dictionaries, between two byte offsets."""
    import pyarrow as arrow

    def read(start: int) -> Any:
        stream.seek(start)
        return _only(arrow.ipc.read_record_batch(arrow.ipc.read_message(stream), schema), columns)

    for message in stream_messages(stream, *span, file.bytes):
        if message.kind != SCHEMA:
            name = f"the record batch at byte {message.start:,}"
            yield Part(partial(read, message.start), name, message.rows, unpacked_bytes(stream, message))


def _whole_stream(file: SourceFile, stream: Any, reader: Any, columns: Sequence[int]) -> Iterator[Part]:
    """Yield all record batches of an IPC stream, in order."""
    import pyarrow as arrow

    if file.ranges:
        # Check sizes before the stream is read: dictionaries are unpacked before the batches that need them.
        for message in stream_messages(stream, 0, file.bytes, file.bytes):
            yield Part(None, f"the message at byte {message.start:,}", 0, unpacked_bytes(stream, message))
        stream.seek(0)
        reader = arrow.ipc.open_stream(stream)
    for number, batch in enumerate(reader):
        yield Part(partial(_only, batch, columns), f"record batch {number:,}", batch.num_rows)


def _only(batch: Any, columns: Sequence[int]) -> Any:
    """Return a batch with only the needed columns; the others may hold values that Python cannot represent."""
    import pyarrow as arrow

    return arrow.RecordBatch.from_arrays(
        [batch.column(place) for place in columns],
        schema=arrow.schema([batch.schema.field(place) for place in columns]),
    )


def _has_dictionary(kind: Any) -> bool:
    """Return whether a type is a dictionary type or contains one at any depth."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind):
        return True
    kind = getattr(kind, "storage_type", kind)
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _rows_before(file: SourceFile, span: Span | None) -> int | None:
    """Count the rows before a span by the headers of the batches; None if a header is damaged."""
    if span is None:
        return 0
    try:
        with open_arrow(file) as (stream, reader):
            if hasattr(reader, "num_record_batches"):
                batches = file_blocks(stream, file.bytes)[1]
                return sum(_message(stream, batches[number], file).rows for number in range(span[0]))
            messages = stream_messages(stream, 0, span[0], file.bytes)
            return sum(message.rows for message in messages if message.kind == RECORDS)
    except (MalformedError, DataError):
        return None


def batches_of(reader: Any) -> Iterator[Any]:
    """Yield all record batches of a `pyarrow.ipc` reader."""
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


@contextmanager
def open_arrow(file: Place) -> Iterator[tuple[Any, Any]]:
    """Open an Arrow file during a block, as a byte stream and a `pyarrow.ipc` reader.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: it is neither an IPC file nor a stream.
    """
    arrow = import_pyarrow(file)
    try:
        # A mapped file is not copied: texts are decoded directly from the page cache.
        stream = arrow.memory_map(file.location) if file.local else arrow.PythonFile(open_file(file), mode="r")
    except OSError as error:
        raise DataError(f"an input file cannot be read: {error}", where=file.location, fix=repair(file)) from None
    with stream:
        try:
            is_file = file.ranges and bytes(stream.read(6)) == b"ARROW1"
            if file.ranges:
                stream.seek(0)
            reader = arrow.ipc.open_file(stream) if is_file else arrow.ipc.open_stream(stream)
            reader.schema.names  # noqa: B018 - access shows whether the names are valid UTF-8
        except HeadwayError:
            raise
        except Exception as error:  # a damaged file can make the library raise any exception
            raise DataError(f"not a readable Arrow file: {error}", where=file.location, fix=repair(file)) from None
        yield stream, reader

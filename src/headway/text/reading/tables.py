"""Reader of texts from Parquet files. It reads only the needed columns, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.core.errors import DataError, HeadwayError
from headway.core.format import counted
from headway.text.reading.documents import UNPACKED, Batch
from headway.text.reading.json_lines import damaged
from headway.text.reading.parquet_pages import UNPACKED_BYTES, PageGuard, page_header
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile, open_file
from headway.text.reading.table_texts import (
    BATCH_BYTES,
    ROWS,
    Span,
    TableTexts,
    columns_for,
    field_of,
    given,
    grouped,
    import_pyarrow,
    repair,
    texts_of,
)

# Rows decoded at once with an encoding in which values share prefixes with the previous value.
_DELTA_ROWS = 16
# Upper limit of a dictionary header in bytes; it has no statistics.
_HEADER_BYTES = 256


def parquet_spans(
    file: SourceFile, field: str, template: str | None, size: int, may_differ: bool = False
) -> tuple[str, list[tuple[Span | None, int]]]:
    """Divide a Parquet file into ranges of row groups of at least `size` bytes, with their shares of the file's bytes.

    Returns:
        The column of its text, and the ranges.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is not a readable Parquet file, or has no such text column.
    """
    with open_parquet(file) as parquet:
        if may_differ:
            field = field_of(parquet.schema_arrow, field)
        columns_for(parquet.schema_arrow, field, template, file.location)
        groups = [parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)]
    total = max(1, sum(groups))
    return field, [((first, end), file.bytes * part // total) for first, end, part in grouped(groups, size)]


def read_parquet(piece: Piece) -> Iterator[Batch]:
    """Yield the texts of some row groups. A row whose text has more than `piece.most` bytes is malformed."""
    file = piece.file
    span = piece.span or (0, 0)
    with _opened(file) as (stream, parquet):
        columns = columns_for(parquet.schema_arrow, piece.field, piece.template, file.location)
        facts = parquet.metadata
        before = sum(facts.row_group(group).num_rows for group in range(span[0]))
        expected = sum(facts.row_group(group).num_rows for group in range(*span))
        texts = TableTexts(piece, lambda row: f"{file.location}:row {before + row + 1}")
        batches = _batches(stream, parquet, span, columns, piece.most)
        rest = False
        for batch in texts_of(map(given, batches), texts):
            yield batch
            rest = rest or any(document.rest for document in batch.bad)
        if texts.rows != expected and not rest:
            what = f"there are {counted(texts.rows, 'row')}, but the footer says {expected:,}"
            yield Batch([], [damaged(texts.place, ValueError(what))])


def _batches(stream: PageGuard, parquet: Any, span: Span, columns: Sequence[str], most: int) -> Iterator[Any]:
    """Yield record batches of some row groups, each small enough for memory."""
    facts = parquet.metadata
    groups = [facts.row_group(number) for number in range(*span)]
    chunks = [
        chunk
        for group in groups
        for chunk in (group.column(number) for number in range(group.num_columns))
        if any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in columns)
    ]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    rows = max(1, min(ROWS, BATCH_BYTES * sum(group.num_rows for group in groups) // max(1, size)))
    # Each row gets a copy of a shared value, which comes from a dictionary or is a prefix of the previous value.
    shared = max((_dictionary_bytes(stream, chunk) for chunk in chunks), default=0)
    rows = max(1, min(rows, UNPACKED * most // 4 // max(1, shared)))
    if any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks):
        rows = min(rows, _DELTA_ROWS)
    places = [(_start(chunk), _start(chunk) + chunk.total_compressed_size) for chunk in chunks]
    stream.watch(places, UNPACKED * most, rows)
    yield from parquet.iter_batches(batch_size=rows, row_groups=range(*span), columns=columns, use_threads=False)


def _start(chunk: Any) -> int:
    """Return the start of a column chunk, by the rule of the library."""
    place = chunk.dictionary_page_offset
    first = chunk.data_page_offset
    return int(place if chunk.has_dictionary_page and place and 0 < place < first else first)


def _dictionary_bytes(stream: PageGuard, chunk: Any) -> int:
    """Return the unpacked bytes of a column chunk's dictionary; 0 if it has none."""
    if not chunk.has_dictionary_page or _start(chunk) == chunk.data_page_offset:
        return 0
    stream.seek(_start(chunk))
    try:
        header, _ = page_header(stream.read(_HEADER_BYTES), 0)
    except (IndexError, ValueError):
        return 0  # the library or the guard reports the problem
    return int(header.get(UNPACKED_BYTES, 0))


@contextmanager
def open_parquet(file: SourceFile) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile` during a block.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is not a readable Parquet file.
    """
    with _opened(file) as (_, opened):
        yield opened


@contextmanager
def _opened(file: SourceFile) -> Iterator[tuple[PageGuard, Any]]:
    import_pyarrow(file)
    import pyarrow.parquet as parquet

    if not file.ranges:
        what = "the server does not support range requests, which a Parquet file needs"
        raise DataError(what, where=file.location, fix="download it, and name the copy")
    with open_file(file) as stream:
        guard = PageGuard(stream)
        try:
            # Without `pre_buffer` and with a buffer, a row group of any size is read as a stream.
            opened = parquet.ParquetFile(guard, pre_buffer=False, buffer_size=2**20)
        except HeadwayError:
            raise
        except Exception as error:  # a damaged file can make the library raise any exception
            raise DataError(f"not a readable Parquet file: {error}", where=file.location, fix=repair(file)) from None
        with opened:
            yield guard, opened

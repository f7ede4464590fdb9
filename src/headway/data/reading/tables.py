"""Parquet files to texts: only the columns that are wanted, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.config.data import MAX_DOCUMENT_BYTES
from headway.core.errors import DataError, HeadwayError
from headway.core.format import counted
from headway.data.reading.documents import Batch
from headway.data.reading.json_lines import damaged
from headway.data.reading.places import SourceFile, open_file
from headway.data.reading.table_texts import (
    BATCH_BYTES,
    REPAIR,
    ROWS,
    Span,
    TableTexts,
    columns_for,
    given,
    grouped,
    import_pyarrow,
    texts_of,
)


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
    return [((first, end), file.bytes * part // total) for first, end, part in grouped(groups, size)]


def read_parquet(
    file: SourceFile, span: Span, field: str, template: str | None, most: int = MAX_DOCUMENT_BYTES
) -> Iterator[Batch]:
    """The texts of some row groups. A row whose text has more than `most` bytes is malformed."""
    with open_parquet(file) as parquet:
        columns = columns_for(parquet.schema_arrow, field, template, file.location)
        facts = parquet.metadata
        before = sum(facts.row_group(group).num_rows for group in range(span[0]))
        expected = sum(facts.row_group(group).num_rows for group in range(*span))
        texts = TableTexts(field, template, most, lambda row: f"{file.location}:row {before + row + 1}")
        batches = parquet.iter_batches(
            batch_size=_rows_at_once(facts, span, columns),
            row_groups=range(*span),
            columns=columns,
            use_threads=False,
        )
        rest = False
        for batch in texts_of(map(given, batches), texts):
            yield batch
            rest = rest or any(document.rest for document in batch.bad)
        if texts.rows != expected and not rest:
            what = f"there are {counted(texts.rows, 'row')}, and the footer says {expected:,}"
            yield Batch([], [damaged(texts.place, ValueError(what))])


@contextmanager
def open_parquet(file: SourceFile) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`, for the length of a block.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no readable Parquet file.
    """
    import_pyarrow(file)
    import pyarrow.parquet as parquet

    if not file.ranges:
        what = "the server gives files from their beginning only, and a Parquet file is read from its end"
        raise DataError(what, where=file.location, fix="download it, and name the copy")
    with open_file(file) as stream:
        try:
            # Without `pre_buffer` and with a buffer a row group is read as a stream, however large it is.
            opened = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        except HeadwayError:
            raise
        except Exception as error:  # what is in a file can have the library raise whatever there is
            raise DataError(f"not a readable Parquet file: {error}", where=file.location, fix=REPAIR) from None
        with opened:
            yield opened


def _rows_at_once(facts: Any, span: Span, columns: Sequence[str]) -> int:
    """Rows that hold about a batch's bytes of text."""
    rows = size = 0
    for group in (facts.row_group(number) for number in range(*span)):
        rows += group.num_rows
        parts = (group.column(number) for number in range(group.num_columns))
        size += sum(part.total_uncompressed_size for part in parts if _below(part.path_in_schema, columns))
    return max(1, min(ROWS, BATCH_BYTES * rows // max(1, size)))


def _below(path: str, columns: Sequence[str]) -> bool:
    return any(path == column or path.startswith(f"{column}.") for column in columns)

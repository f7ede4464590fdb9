"""From a piece of a file to documents, one at a time; what is malformed is reported with its place, not raised."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.core.errors import DataError, missing_extra
from headway.data.sources import Piece, SourceFile, fields_there, missing_field, open_parquet

_BOM = b"\xef\xbb\xbf"
_BLOCK = 2**20
# What a truncated or damaged compressed stream raises while it is read.
_DAMAGE = (EOFError, zlib.error, OSError)


@dataclass(frozen=True)
class Document:
    """One text; `utf8` is the same text in bytes, which hashing and counting need."""

    text: str
    utf8: bytes


@dataclass(frozen=True)
class BadDocument:
    """A document, or the rest of a file, that cannot be used."""

    where: str
    """file:line, file:row, or the file."""
    reason: str

    def error(self) -> DataError:
        """The error for those who do not want to go on without it."""
        return DataError(self.reason, where=self.where, fix="repair it, or set data.bad_documents: skip")


Documents = Iterator[Document | BadDocument]


def read_documents(piece: Piece) -> Documents:
    """The documents of a piece in input order.

    Raises:
        ConfigError: the file needs an extra that is not installed.
        DataError: the table has no such column: a mistake in the config, not in a document.
    """
    return _READERS[piece.file.format](piece)


def _read_text(piece: Piece) -> Documents:
    where = str(piece.file.path)
    try:
        with _open(piece.file) as stream:
            data = stream.read().removeprefix(_BOM)
    except _DAMAGE as error:
        yield _damaged(where, error)
        return
    if data:
        yield _decode(data, lambda: where)


def _decode(data: bytes, where: Callable[[], str]) -> Document | BadDocument:
    try:
        return Document(data.decode(), data)
    except UnicodeDecodeError as error:
        return BadDocument(where(), f"not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}")


def _document(value: Any, field: str, where: Callable[[], str]) -> Document | BadDocument:
    """A document from a field's value."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        return BadDocument(where(), f"field '{field}' holds {kind}, not text")
    try:
        return Document(value, value.encode())
    except UnicodeEncodeError as error:
        # Undecodable bytes of a CSV file, or half of a surrogate pair in a JSON escape.
        return BadDocument(where(), f"not valid UTF-8: {error.reason} at character {error.start:,}")


def _read_jsonl(piece: Piece) -> Documents:
    path, (start, end) = piece.file.path, piece.span or (0, None)
    base: int | None = None  # number of lines before the piece: counted only when it is needed to name a line
    number = 0

    def where() -> str:
        nonlocal base
        if base is None:
            base = _lines_before(path, first)
        return f"{path}:{base + number}"

    try:
        with _open(piece.file) as stream:
            first = position = _seek_line(stream, start)
            while end is None or position < end:
                line = stream.readline()
                if not line:
                    return
                number += 1
                line, position = line.removeprefix(_BOM) if position == 0 else line, position + len(line)
                if not line.isspace():
                    yield _json_document(line, piece.field, where)
    except _DAMAGE as error:
        number += 1
        yield _damaged(where(), error)


def _json_document(line: bytes, field: str, where: Callable[[], str]) -> Document | BadDocument:
    decoded = _decode(line, where)
    if isinstance(decoded, BadDocument):
        return decoded
    try:
        record = json.loads(decoded.text)
    except (ValueError, RecursionError) as error:
        return BadDocument(where(), f"not valid JSON: {error}")
    if not isinstance(record, dict):
        return BadDocument(where(), f"holds {type(record).__name__}, not a JSON object")
    if field not in record:
        return BadDocument(where(), f"no field '{field}'{fields_there(field, list(record))}")
    return _document(record[field], field, where)


def _seek_line(stream: BinaryIO, start: int) -> int:
    """Go to the first line that begins at or after byte `start`; returns where that is."""
    if start == 0:
        return 0
    stream.seek(start - 1)
    while True:
        # In blocks: the line may be far longer than memory should be.
        block = stream.readline(_BLOCK)
        if not block or block.endswith(b"\n"):
            return stream.tell()


def _lines_before(path: Path, offset: int) -> int:
    """Number of line ends in the first `offset` bytes of a plain file."""
    count = 0
    if offset:
        with path.open("rb") as stream:
            while offset > 0 and (block := stream.read(min(_BLOCK, offset))):
                count += block.count(b"\n")
                offset -= len(block)
    return count


def _read_csv(piece: Piece) -> Documents:
    path, field = piece.file.path, piece.field
    csv.field_size_limit(2**31 - 1)  # the module's default of 128 KiB is shorter than many documents
    last = 0

    def where() -> str:
        return f"{path}:{last + 1}"

    try:
        with _open(piece.file) as stream:
            # Bytes that are no UTF-8 become surrogates here and are found by `_document`, for the field that matters.
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            rows = csv.reader(lines, strict=True)
            header = next(rows, None)
            if header is None:
                return
            if field not in header:
                raise missing_field(field, header, f"{path}:1")
            column = header.index(field)
            while True:
                last = rows.line_num
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    yield BadDocument(where(), f"not valid CSV: {error}")
                    continue
                if row and column >= len(row):
                    yield BadDocument(where(), f"row has {len(row)} of {len(header)} columns")
                elif row:
                    yield _document(row[column], field, where)
    except _DAMAGE as error:
        yield _damaged(where(), error)


def _read_parquet(piece: Piece) -> Documents:
    import pyarrow as arrow

    path, (start, end) = piece.file.path, piece.span or (0, 0)
    with open_parquet(path) as parquet:
        number = sum(parquet.metadata.row_group(group).num_rows for group in range(start))

        def where() -> str:
            return f"{path}:row {number}"

        try:
            batches = parquet.iter_batches(
                batch_size=256, row_groups=range(start, end), columns=[piece.field], use_threads=False
            )
            for batch in batches:
                for value in batch.column(0):
                    number += 1
                    try:
                        yield _document(value.as_py(), piece.field, where)
                    except UnicodeDecodeError as error:
                        yield BadDocument(where(), f"not valid UTF-8 at offset {error.start:,}")
        except (arrow.ArrowException, OSError) as error:
            number += 1
            yield _damaged(where(), error)


_READERS: dict[str, Callable[[Piece], Documents]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
}


def _damaged(where: str, error: BaseException) -> BadDocument:
    return BadDocument(where, f"the file cannot be read from here on: {error}")


def _open(file: SourceFile) -> BinaryIO:
    """A file's bytes, decompressed."""
    if file.compression == "gzip":
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    if file.compression == "zstd":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(file.path), _BLOCK))
    return file.path.open("rb", buffering=_BLOCK)


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a zstd file; unlike the library's own reader it tells a cut file from a whole one."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise missing_extra("zstandard", "zstd", f"reading {path.name}") from None
        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._file.read(2**14)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("the compressed file ends too early")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

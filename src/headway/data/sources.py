"""Which files a config's sources mean, in what order, and how they are cut into pieces of work."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.schema import SourceConfig, source_name
from headway.core.console import warning
from headway.core.errors import DataError, missing_extra

#: Bytes of a large file that one worker handles at a time. The store's bytes do not depend on it.
PIECE_BYTES = 4 * 2**20

_FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_STDLIB = "stdlib:"
# Third-party code is not the standard library's own text.
_STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """One input file."""

    path: Path
    name: str
    """Path relative to its source, with forward slashes: the same wherever the source lies."""
    format: str
    """text, jsonl, csv or parquet."""
    compression: str | None
    """gzip, zstd or None."""
    bytes: int


@dataclass(frozen=True)
class Source:
    """One source of the config with the files found for it."""

    name: str
    field: str
    """Field or column that holds a document's text."""
    files: list[SourceFile]
    ignored: int = 0
    """Files in its folder that were passed over because their ending is no known format."""


@dataclass(frozen=True)
class Piece:
    """What a worker reads in one go: a file, or a range of a large one."""

    source: int
    """Number of the source in the config."""
    file: SourceFile
    field: str
    span: tuple[int, int] | None
    """Byte range (jsonl: the lines that begin in it) or range of row groups (parquet); the whole file when None."""
    bytes: int
    """Its share of the file's bytes, for progress."""


def find_sources(configs: Sequence[SourceConfig]) -> list[Source]:
    """The files of all sources, each source's sorted by name; a file that two sources mean belongs to the first.

    Raises:
        DataError: a path or glob matches nothing, a file cannot be read, or its format is unknown.
    """
    sources: list[Source] = []
    seen: set[Path] = set()
    for config in configs:
        files, ignored = [], 0
        found = sorted((name, path) for path, name in _matches(config.path))
        for name, path in found:
            kind = _format_of(config, path)
            if kind is None and _is_one_file(config.path):
                raise _unknown_format(path)
            if kind is None:
                ignored += 1
            elif path.resolve() not in seen:
                seen.add(path.resolve())
                files.append(SourceFile(path, name, *kind, bytes=_size(path)))
        if ignored == len(found):
            raise _nothing_found(config.path, ignored)
        name = _unique_name(config, {source.name for source in sources})
        if not files:
            warning(f"source '{name}' has no files of its own: earlier sources have them all")
        sources.append(Source(name, config.field, files, ignored))
    return sources


def _matches(path: str) -> Iterator[tuple[Path, str]]:
    """Files a path means, each with its name relative to the source."""
    if path == _STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        # Some packages' `__init__.py` are empty, which is no reason for a warning.
        yield from ((p, n) for p, n in _walk(root, _STDLIB_WITHOUT) if p.suffix == ".py" and p.stat().st_size)
        return
    place = Path(path).expanduser()
    if place.is_dir():
        yield from _walk(place, set())
    elif place.is_file():
        yield place, place.name
    elif glob.has_magic(path):
        root = _glob_root(place)
        # Unlike pathlib's, this glob passes over hidden files.
        for match in map(Path, glob.glob(str(place), recursive=True)):  # noqa: PTH207
            if match.is_file():
                yield match, match.relative_to(root).as_posix()


def _walk(root: Path, without: set[str]) -> Iterator[tuple[Path, str]]:
    """Files below a folder but hidden ones and those in folders named in `without`."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path, path.relative_to(root).as_posix()


def _glob_root(pattern: Path) -> Path:
    """The part of a glob before its first wildcard."""
    parts = pattern.parts
    wild = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:wild])


def _is_one_file(path: str) -> bool:
    return Path(path).expanduser().is_file()


def _format_of(config: SourceConfig, path: Path) -> tuple[str, str | None] | None:
    """Format and compression of a file; None when its ending is unknown."""
    endings = [ending.lower() for ending in path.suffixes]
    compression = _COMPRESSIONS.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    if config.path == _STDLIB:
        return "text", None
    if config.format != "auto":
        return config.format, None if config.format == "parquet" else compression
    kind = _FORMATS.get(endings[-1]) if endings else None
    if kind is None or (kind == "parquet" and compression):
        return None
    return kind, compression


def _size(path: Path) -> int:
    try:
        with path.open("rb"):
            return path.stat().st_size
    except OSError as error:
        raise DataError(
            f"an input file cannot be read: {error.strerror}", where=str(path), fix="make it readable, or leave it out"
        ) from None


def _unique_name(config: SourceConfig, taken: set[str]) -> str:
    """A name that can be a folder and that no earlier source has."""
    base = re.sub(r"[^\w.-]+", "-", config.name or source_name(config.path)).strip(".-") or "source"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name


def _unknown_format(path: Path) -> DataError:
    return DataError(
        f"the ending of '{path.name}' is no known format ({', '.join(_FORMATS)}, plain or under .gz, .zst)",
        where=str(path),
        fix="set the source's format: text, jsonl, csv or parquet",
    )


def _nothing_found(path: str, ignored: int) -> DataError:
    if ignored:
        what = f"none of the {ignored} files has a known ending ({', '.join(_FORMATS)}, plain or under .gz, .zst)"
        fix = "set the source's format: text, jsonl, csv or parquet"
    elif Path(path).expanduser().is_dir():
        what, fix = "the folder holds no files (hidden ones are not read)", "check data.sources"
    elif glob.has_magic(path):
        what, fix = (
            "the glob matches no files",
            "check data.sources; paths are relative to the working directory",
        )
    else:
        what, fix = (
            "there is no such file or folder",
            "check data.sources; paths are relative to the working directory",
        )
    return DataError(what, where=path, fix=fix)


def pieces_of(sources: Sequence[Source]) -> Iterator[Piece]:
    """All work in input order. Only plain JSON Lines and Parquet files can be read from the middle.

    Raises:
        ConfigError: a Parquet file needs an extra that is not installed.
        DataError: a Parquet file's footer is unreadable, or it has no such column of text.
    """
    for number, source in enumerate(sources):
        for file in source.files:
            if file.format == "parquet":
                yield from _parquet_pieces(number, source, file)
            elif file.format == "jsonl" and not file.compression and file.bytes > PIECE_BYTES:
                for start in range(0, file.bytes, PIECE_BYTES):
                    end = min(start + PIECE_BYTES, file.bytes)
                    yield Piece(number, file, source.field, (start, end), end - start)
            else:
                yield Piece(number, file, source.field, None, file.bytes)


def _parquet_pieces(number: int, source: Source, file: SourceFile) -> Iterator[Piece]:
    with open_parquet(file.path) as parquet:
        _check_column(parquet.schema_arrow, source.field, file.path)
        groups = [parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)]
    total = max(1, sum(groups))
    start, size = 0, 0
    for end, group in enumerate(groups, 1):
        size += group
        if size >= PIECE_BYTES or end == len(groups):
            yield Piece(number, file, source.field, (start, end), file.bytes * size // total)
            start, size = end, 0


def open_parquet(path: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no readable Parquet file.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"reading {path.name}") from None
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"not a readable Parquet file: {error}", where=str(path), fix="repair it, or leave it out of data.sources"
        ) from None


def _check_column(schema: Any, column: str, path: Path) -> None:
    import pyarrow as arrow

    if column not in schema.names:
        raise missing_field(column, schema.names, str(path))
    kind = schema.field(column).type
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise DataError(f"column '{column}' holds {kind}, not text", where=str(path), fix="set the source's field")


def missing_field(wanted: str, present: Sequence[str], where: str) -> DataError:
    """The error for a record or table without the field that should hold the text."""
    return DataError(f"no field '{wanted}'{fields_there(wanted, present)}", where=where, fix="set the source's field")


def fields_there(wanted: str, present: Sequence[str]) -> str:
    """The fields that are there instead of the wanted one, the nearest name first named."""
    import difflib

    near = difflib.get_close_matches(wanted, present, 1)
    guess = f"; did you mean '{near[0]}'?" if near else ""
    names = ", ".join(sorted(present)[:20]) or "none"
    return f"; there are: {names}{guess}"

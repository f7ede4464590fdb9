"""The files of a config's sources, their order, and their division into pieces of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from headway.config.sections.data import MAX_DOCUMENT_BYTES, SourceConfig, source_name, stored_names
from headway.config.template import CHAT
from headway.config.units import Amount
from headway.core.console import progress, warning
from headway.core.errors import ConfigError, DataError
from headway.core.storage import missing_fix
from headway.data.reading import huggingface_datasets as hub
from headway.data.reading import streams
from headway.data.reading.arrow_files import arrow_spans
from headway.data.reading.compression import ENDINGS
from headway.data.reading.json_lines import first_complaint
from headway.data.reading.pieces import Piece as Piece
from headway.data.reading.places import STDLIB, Listing, Place, is_remote, list_places, stamp_of
from headway.data.reading.places import SourceFile as SourceFile
from headway.data.reading.table_texts import Span
from headway.data.reading.tables import parquet_spans

#: Bytes of a large file that one worker processes at a time.
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
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
# Formats with their own index and compression.
_TABLES = ("parquet", "arrow")
# Formats whose records may hold the messages of a conversation.
_WITH_LISTS = ("jsonl", *_TABLES)
# Tables opened in parallel: opening a remote table is mostly latency.
_OPENED = 16
_KNOWN = f"({', '.join(_FORMATS)}, all but tables also under {', '.join(ENDINGS)}, and .json under these)"
_SET_FORMAT = "set the source's format: text, jsonl, csv, parquet or arrow"


@dataclass(frozen=True)
class Source:
    """One source of the config, with its files."""

    name: str
    field: str
    """Field or column that holds a document's text."""
    files: list[SourceFile]
    """Its files in order; empty for a stream."""
    ignored: int = 0
    """Number of files in its folder that were skipped because of an unknown file extension."""
    template: str | None = None
    """Template over several fields, instead of `field`."""
    stream: streams.Stream | None = None
    """Function that returns its documents (texts, or mappings with fields) anew at each call."""
    location: str = ""
    """Its path in the config, which names a stream in messages."""
    limit: Amount | None = None
    """Amount of it to use, from its beginning."""
    most: int = MAX_DOCUMENT_BYTES
    """Size limit of a record in bytes (`data.max_document_bytes`)."""
    _cuts: dict[SourceFile, tuple[str, list[tuple[Span | None, int]]]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    """Division of each opened table, with the table's stamp at that time (`open_tables`)."""

    @property
    def bytes(self) -> int:
        """Bytes of its files, up to a limit in bytes; 0 for a stream, whose size is unknown."""
        size = sum(file.bytes for file in self.files)
        return size if self.limit is None or self.limit.unit != "bytes" else min(size, self.limit.amount)


def find_sources(
    configs: Sequence[SourceConfig], iterables: Mapping[str, Any] | None = None, most: int = MAX_DOCUMENT_BYTES
) -> list[Source]:
    """Find the files of all sources, each source's sorted by name.

    If two sources read the same text of a file, the file belongs to the first one.

    Args:
        configs: The sources.
        iterables: Texts (or mappings with fields) by name, for sources with the bare path `python:`.
        most: Size limit of a record in bytes (`data.max_document_bytes`).

    Raises:
        ConfigError: a source needs a package that is not installed, or names a function that does not exist; or a file
            belongs to an earlier source with a limit, so that neither source would use the rest of the file.
        DataError: a path or glob matches nothing, a file cannot be read, its format is unknown, or a remote place
            cannot be reached.
    """
    sources: list[Source] = []
    owners: dict[tuple[Any, ...], int] = {}
    for number, (config, name) in enumerate(zip(configs, stored_names(configs), strict=True)):
        found, ignored = _find(config, iterables or {})
        files, stream = [], None
        if callable(found):
            stream = found
        else:
            for file in found:
                owner = owners.get(reading := _reading_of(file, config))
                if owner is None:
                    owners[reading] = number
                    files.append(file)
                elif owner != number and sources[owner].limit is not None:
                    raise _behind_a_limit(file, sources[owner].name, name)
            if not files:
                warning(f"source '{name}' has no files of its own: earlier sources have them all")
        how = config.text_template, stream, config.path, config.limit, most
        sources.append(Source(name, config.field, files, ignored, *how))
    return sources


def _reading_of(file: SourceFile, config: SourceConfig) -> tuple[Any, ...]:
    """Return a key that is equal for two sources that read the same text of a file."""
    place = str(file.path.resolve()) if file.local else file.location
    own = tuple(step.model_dump_json() for step in config.clean)  # with other steps a source has other text
    if file.format == "text":
        return place, "text", None, None, own
    return place, file.format, config.field, config.text_template, own


def _behind_a_limit(file: SourceFile, owner: str, name: str) -> ConfigError:
    return ConfigError(
        f"sources '{owner}' and '{name}' read the same file, and neither would use what lies after the limit of"
        f" '{owner}'",
        where=f"data.sources, {file.location}",
        fix=f"leave the file to one of them, or the limit of '{owner}' out",
    )


def _find(config: SourceConfig, iterables: Mapping[str, Any]) -> tuple[list[SourceFile] | streams.Stream, int]:
    """Return a source's files in order, or its stream, and the number of skipped files."""
    if config.path == streams.PREFIX:
        return streams.given_stream(config.name or source_name(config.path), iterables), 0
    if config.path.startswith(streams.PREFIX):
        return streams.function_stream(config.path), 0
    if hub.is_named(config.path):
        return _dataset(hub.find_named(config)), 0
    path = hub.local_path(config.path)
    listing = list_places(path, config.storage_options, lambda name: _format_of(config, name) is not None)
    saved = hub.find_saved(listing.places, config) if listing.kind == "folder" else None
    if saved is not None:
        return _dataset(saved), 0
    files, ignored = [], 0
    for place in listing.places:
        kind = _format_of(config, place.name)
        if kind is None and listing.kind == "file":
            what = f"the ending of '{place.name}' is no known format {_KNOWN}"
            raise DataError(what, where=place.location, fix=_SET_FORMAT)
        if kind is None:
            ignored += 1
        else:
            files.append(_file(place, *kind))
    if not files:
        raise _nothing_found(config.path, listing, ignored)
    return files, ignored


def _dataset(found: hub.Found) -> list[SourceFile] | streams.Stream:
    return found if callable(found) else [_file(place, "arrow", None) for place in found]


def _file(place: Place, kind: str, compression: str | None) -> SourceFile:
    return SourceFile(**{**vars(place), "format": kind, "compression": compression})


def _format_of(config: SourceConfig, name: str) -> tuple[str, str | None] | None:
    """Return format and compression of a file; None if its extension is unknown."""
    endings = [ending.lower() for ending in PurePosixPath(name).suffixes]
    compression = ENDINGS.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    if config.path == STDLIB:
        return "text", None
    if config.format not in ("auto", "chat"):
        return config.format, None if config.format in _TABLES else compression
    kind = _FORMATS.get(endings[-1]) if endings else None
    if (compression or config.format == "chat") and endings[-1:] == [".json"]:
        return "jsonl", compression  # the shards of C4, Dolma and others; a plain .json is often one large value
    if config.format == "chat" and kind not in _WITH_LISTS:
        return None
    if kind is None or (kind in _TABLES and compression):
        return None
    return kind, compression


def _nothing_found(path: str, listing: Listing, ignored: int) -> DataError:
    fix = "check data.sources"
    if ignored:
        what, fix = f"none of the {ignored} files has a known ending {_KNOWN}", _SET_FORMAT
    elif listing.kind == "folder":
        what = "the folder holds no files (hidden ones are not read)"
    else:
        what = "the glob matches no files" if listing.kind == "glob" else "there is no such file or folder"
        fix = missing_fix(path) if is_remote(path) else f"{fix}; paths are relative to the working directory"
    return DataError(what, where=path, fix=fix)


def pieces_of(sources: Sequence[Source]) -> Iterator[Piece]:
    """Yield all pieces in input order. The division of files depends only on the files.

    Uncompressed JSON Lines, Parquet and Arrow files are divided. A stream is read here lazily, and each of its pieces
    carries its texts.

    Raises:
        ConfigError: a file needs an extra that is not installed.
        DataError: a table is unreadable or lacks the text column, none of a source's first records has the field, or a
            stream fails. For a source with a limit, reading the table's piece raises the error instead.
    """
    for number, source in enumerate(sources):
        if source.stream is not None:
            yield from _stream_pieces(number, source)
        _check_first_records(source)
        for file in source.files:
            yield from _file_pieces(number, source, file)


def check_sources(sources: Sequence[Source]) -> None:
    """Look into the sources, so that a wrong field shows before hours of reading.

    Raises:
        ConfigError, DataError: as in `pieces_of`; or all files are empty.
    """
    files = [file for source in sources for file in source.files]
    if files and not any(file.bytes for file in files) and not any(source.stream for source in sources):
        where = f"{files[0].location}{f' and {len(files) - 1} more' if len(files) > 1 else ''}"
        raise DataError("the input holds no text", where=where, fix="check data.sources")
    open_tables(sources)
    for source in sources:
        _check_first_records(source)


def open_tables(sources: Sequence[Source]) -> None:
    """Open all tables in parallel to determine their division, so that `pieces_of` need not open them one by one.

    Tables of a source with a limit are not opened, since the limit may be reached before them.

    Raises:
        ConfigError, DataError: as in `pieces_of`.
    """
    new = [
        (source, file)
        for source in sources
        if source.limit is None
        for file in source.files
        if file.format in _TABLES and file not in source._cuts
    ]
    if not new:
        return
    with progress("opening tables", len(new), "files") as bar, ThreadPoolExecutor(min(_OPENED, len(new))) as pool:
        for _ in pool.map(_cut_table, *zip(*new, strict=True)):
            bar.advance()


def _cut_table(source: Source, file: SourceFile) -> list[tuple[Span | None, int]]:
    """Return the present parts of a table, each with its bytes."""
    stamp = stamp_of(file) if file.local else ""  # for a remote file, `file` itself holds the version
    known = source._cuts.get(file)
    if known is None or known[0] != stamp:
        spans_of = parquet_spans if file.format == "parquet" else arrow_spans
        known = source._cuts[file] = (stamp, [*spans_of(file, source.field, source.template, PIECE_BYTES)])
    return known[1]


def _file_pieces(number: int, source: Source, file: SourceFile) -> Iterator[Piece]:
    try:
        spans = list(_spans(source, file))
    except DataError as error:
        if source.limit is None:
            raise
        # The limit may be reached before this file, and then its error does not matter.
        yield Piece(number, file, source.field, None, file.bytes, source.template, problem=error, most=source.most)
        return
    for span, size in spans:
        yield Piece(number, file, source.field, span, size, source.template, most=source.most)


def _spans(source: Source, file: SourceFile) -> Iterator[tuple[tuple[int, int] | None, int]]:
    """Yield the parts of a file, each with its bytes."""
    if file.format in _TABLES:
        if file not in source._cuts:
            open_tables([source])
        yield from _cut_table(source, file)
    elif _is_cut(file):
        for start in range(0, file.bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, file.bytes)
            yield (start, end), end - start
    else:
        yield None, file.bytes


def longest_piece(sources: Sequence[Source]) -> int:
    """Estimate the bytes of the largest piece that a worker must process; 0 if there are only streams."""
    files = (file for source in sources for file in source.files)
    return max((PIECE_BYTES if file.format in _TABLES or _is_cut(file) else file.bytes for file in files), default=0)


def _is_cut(file: SourceFile) -> bool:
    return file.format == "jsonl" and not file.compression and file.bytes > PIECE_BYTES and file.ranges


def _stream_pieces(number: int, source: Source) -> Iterator[Piece]:
    assert source.stream is not None
    file = SourceFile(source.location, source.name, 0, local=False, ranges=False, format="stream")
    fields = source.field, source.template
    batches = streams.read_stream(
        source.location, source.stream, *fields, size=PIECE_BYTES, limit=source.limit, most=source.most
    )
    for batch, size in batches:
        texts, bad, empty = tuple(batch.texts), tuple(batch.bad), tuple(batch.empty.items())
        yield Piece(number, file, source.field, None, size, source.template, texts, bad, empty)


def _check_first_records(source: Source) -> None:
    """Check that some of a source's first records have the fields.

    If none has, the config is wrong, and skipping malformed documents would yield an empty corpus.

    Raises:
        DataError: none of the first records has the fields.
    """
    first = next((file for file in source.files if file.bytes), None)
    if first is not None and first.format == "jsonl":
        complaint = first_complaint(first, source.field, source.template, source.most)
        if complaint is not None:
            fix = "set the source's field" if source.template is None else "name fields in the template that are there"
            fix = "rename the fields, or leave format: chat out" if source.template == CHAT else fix
            raise DataError(complaint.reason, where=complaint.where, fix=fix)

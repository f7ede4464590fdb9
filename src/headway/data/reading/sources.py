"""Which files a config's sources mean, in what order, and how they are cut into pieces of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from headway.config.data import MAX_DOCUMENT_BYTES, SourceConfig, source_name, stored_names
from headway.config.units import Amount
from headway.core.console import progress, warning
from headway.core.errors import ConfigError, DataError
from headway.core.object_storage import missing_fix
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

#: Bytes of a large file that one worker handles at a time.
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
# Formats with a footer or an index of their own, which compress what they hold by themselves.
_TABLES = ("parquet", "arrow")
# Tables that are opened at a time: far away, a request takes long and little else.
_OPENED = 16
_KNOWN = f"({', '.join(_FORMATS)}, all but tables also under {', '.join(ENDINGS)})"
_SET_FORMAT = "set the source's format: text, jsonl, csv, parquet or arrow"


@dataclass(frozen=True)
class Source:
    """One source of the config with the files found for it."""

    name: str
    field: str
    """Field or column that holds a document's text."""
    files: list[SourceFile]
    """Its files in order; none when it is a stream."""
    ignored: int = 0
    """Files in its folder that were passed over because their ending is no known format."""
    template: str | None = None
    """Makes the text of several fields, instead of `field`."""
    stream: streams.Stream | None = None
    """Gives its documents (texts, or mappings with fields) anew at each call."""
    location: str = ""
    """Its path in the config, which names a stream in messages."""
    limit: Amount | None = None
    """As much of it is used, from its beginning on."""
    most: int = MAX_DOCUMENT_BYTES
    """Bytes that a record of it may have (`data.max_document_bytes`)."""
    _cuts: dict[SourceFile, tuple[str, list[tuple[Span | None, int]]]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )
    """Where tables that were opened are cut, each with its stamp then (`open_tables`)."""

    @property
    def bytes(self) -> int:
        """Bytes of its files, but no more than a limit in bytes; 0 for a stream, of which nobody knows."""
        size = sum(file.bytes for file in self.files)
        return size if self.limit is None or self.limit.unit != "bytes" else min(size, self.limit.amount)


def find_sources(
    configs: Sequence[SourceConfig], iterables: Mapping[str, Any] | None = None, most: int = MAX_DOCUMENT_BYTES
) -> list[Source]:
    """The files of all sources, each source's sorted by name.

    A file that two sources mean, and read for the same text, belongs to the first.

    Args:
        configs: The sources.
        iterables: By name, the texts (or mappings with fields) of sources whose path is `python:` and nothing more.
        most: Bytes that a record may have (`data.max_document_bytes`).

    Raises:
        ConfigError: a source needs a package that is not installed, or names a function that is not there; or one whose
            file belongs to another has no part in it, nor has that behind its limit.
        DataError: a path or glob matches nothing, a file cannot be read, its format is unknown, or a remote place
            cannot be reached.
    """
    sources: list[Source] = []
    owners: dict[tuple[str | None, ...], int] = {}
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
        how = config.template, stream, config.path, config.limit, most
        sources.append(Source(name, config.field, files, ignored, *how))
    return sources


def _reading_of(file: SourceFile, config: SourceConfig) -> tuple[str | None, ...]:
    """What tells that two sources read the same of a file."""
    place = str(file.path.resolve()) if file.local else file.location
    return (place, "text", None, None) if file.format == "text" else (place, file.format, config.field, config.template)


def _behind_a_limit(file: SourceFile, owner: str, name: str) -> ConfigError:
    return ConfigError(
        f"sources '{owner}' and '{name}' mean the same file, and what is behind the limit of '{owner}' would be in"
        " neither",
        where=f"data.sources, {file.location}",
        fix=f"leave the file to one of them, or the limit of '{owner}' out",
    )


def _find(config: SourceConfig, iterables: Mapping[str, Any]) -> tuple[list[SourceFile] | streams.Stream, int]:
    """A source's files in order, or its stream; and how many files were passed over."""
    if config.path == streams.PREFIX:
        return streams.given_stream(config.name or source_name(config.path), iterables), 0
    if config.path.startswith(streams.PREFIX):
        return streams.function_stream(config.path), 0
    if hub.is_named(config.path):
        return _dataset(hub.find_named(config)), 0
    path = hub.local_path(config.path)
    listing = list_places(path, config.storage_options)
    saved = hub.find_saved(listing.places, config) if listing.kind == "folder" else None
    if saved is not None:
        return _dataset(saved), 0
    files, ignored = [], 0
    for place in listing.places:
        kind = _format_of(config, place)
        if kind is None and listing.kind == "file":
            raise _unknown_format(place)
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


def _format_of(config: SourceConfig, place: Place) -> tuple[str, str | None] | None:
    """Format and compression of a file; None when its ending is unknown."""
    endings = [ending.lower() for ending in PurePosixPath(place.name).suffixes]
    compression = ENDINGS.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    if config.path == STDLIB:
        return "text", None
    if config.format != "auto":
        return config.format, None if config.format in _TABLES else compression
    kind = _FORMATS.get(endings[-1]) if endings else None
    if kind is None or (kind in _TABLES and compression):
        return None
    return kind, compression


def _unknown_format(place: Place) -> DataError:
    return DataError(f"the ending of '{place.name}' is no known format {_KNOWN}", where=place.location, fix=_SET_FORMAT)


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
    """All work in input order. Where files are cut depends on the files alone.

    Plain JSON Lines, Parquet and Arrow files can be read from the middle. A stream is read here, as far as its pieces
    are asked for; each carries its texts.

    Raises:
        ConfigError: a file needs an extra that is not installed.
        DataError: a table is unreadable or has no such column of text (of a source with a limit reading its piece
            raises that), none of a source's first records has the field, or a stream fails.
    """
    for number, source in enumerate(sources):
        if source.stream is not None:
            yield from _stream_pieces(number, source)
        _check_first_records(source)
        for file in source.files:
            yield from _file_pieces(number, source, file)


def open_tables(sources: Sequence[Source]) -> None:
    """Look into all tables, several at a time, for where they are cut; `pieces_of` does not open them again.

    Of a source with a limit none is opened: it may be reached before them.

    Raises:
        ConfigError, DataError: as `pieces_of`.
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
    """The parts of a table, each with its bytes, as they are now."""
    stamp = stamp_of(file) if file.local else ""  # what a server told of it when it was listed is in `file`
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
        # The limit may be reached before it, and what is behind that is nobody's business.
        yield Piece(number, file, source.field, None, file.bytes, source.template, problem=error, most=source.most)
        return
    for span, size in spans:
        yield Piece(number, file, source.field, span, size, source.template, most=source.most)


def _spans(source: Source, file: SourceFile) -> Iterator[tuple[tuple[int, int] | None, int]]:
    """The parts of a file, each with its bytes."""
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
    """About how many bytes of input a single worker has to take at most; 0 where there are only streams."""
    files = (file for source in sources for file in source.files)
    return max((PIECE_BYTES if file.format in _TABLES or _is_cut(file) else file.bytes for file in files), default=0)


def _is_cut(file: SourceFile) -> bool:
    return file.format == "jsonl" and not file.compression and file.bytes > PIECE_BYTES and file.ranges


def _stream_pieces(number: int, source: Source) -> Iterator[Piece]:
    assert source.stream is not None
    file = SourceFile(source.location, source.name, 0, local=False, ranges=False, format="stream")
    fields = source.field, source.template
    batches = streams.read_stream(source.location, source.stream, *fields, PIECE_BYTES, source.limit, source.most)
    for batch, size in batches:
        texts, bad, empty = tuple(batch.texts), tuple(batch.bad), tuple(batch.empty.items())
        yield Piece(number, file, source.field, None, size, source.template, texts, bad, empty)


def _check_first_records(source: Source) -> None:
    """Refuse a field or template that none of a source's first records has: a mistake in the config, which skipping
    malformed documents would turn into an empty corpus."""
    first = next((file for file in source.files if file.bytes), None)
    if first is not None and first.format == "jsonl":
        complaint = first_complaint(first, source.field, source.template, source.most)
        if complaint is not None:
            fix = "set the source's field" if source.template is None else "name fields in the template that are there"
            raise DataError(complaint.reason, where=complaint.where, fix=fix)

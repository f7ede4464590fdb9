"""The files of a config's sources, their order, and their division into pieces of work."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headway.config.sections.data import MAX_DOCUMENT_BYTES, SourceConfig, source_name, stored_names
from headway.config.template import LAYOUTS
from headway.config.units import Amount
from headway.core.console import notice, progress, warning
from headway.core.errors import ConfigError, DataError
from headway.core.hub import or_on_hub
from headway.core.storage import missing_fix
from headway.text.reading import huggingface_datasets as hub
from headway.text.reading import streams
from headway.text.reading.archives import archive_named, unpacking
from headway.text.reading.arrow_files import arrow_spans
from headway.text.reading.csv_rows import first_rows
from headway.text.reading.endings import KNOWN, TABLES, delimiter_of, describe_left_out, format_of, kind_of, matches
from headway.text.reading.guessing import DEFAULT, fields_of_records, fields_of_rows, guessed_field
from headway.text.reading.json_lines import begins_with_field, first_complaint, first_records, must_be_whole
from headway.text.reading.pieces import Piece as Piece
from headway.text.reading.places import Listing, Place, is_remote, list_places, stamp_of
from headway.text.reading.places import SourceFile as SourceFile
from headway.text.reading.records import field_fix
from headway.text.reading.table_texts import Span
from headway.text.reading.tables import parquet_spans

#: Bytes of a large file that one worker processes at a time.
PIECE_BYTES = 4 * 2**20

# Files opened in parallel: opening a remote file is mostly latency.
_OPENED = 16
# Rows of a CSV file that show which of its columns hold text.
_FIRST_ROWS = 20
_SET_FORMAT = "set the source's format: text, jsonl, csv, parquet or arrow"


@dataclass(frozen=True)
class _Opened:
    """What opening a file has shown."""

    stamp: str
    """The file's stamp at that time; empty for a remote file, which carries its version itself."""
    field: str
    spans: list[tuple[Span | None, int]]
    """Division of a table, with the bytes of each part."""
    has_field: bool = True
    """Whether its records have the field."""
    whole: bool = False
    """Whether a file of JSON has no lines at which it could be cut."""


@dataclass(frozen=True)
class Source:
    """One source of the config, with its files."""

    name: str
    field: str
    """Field or column that holds a document's text."""
    files: list[SourceFile]
    """Its files in order; empty for a stream."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Numbers of the files in its folder that are not read, by kind (`endings.kind_of`)."""
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
    strict: bool = False
    """Whether its text is in `field` and no other, even where no file has one of that name."""
    _opened: dict[SourceFile, _Opened] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What opening some files has shown (`open_tables`)."""
    _said: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)
    """Fields that were found, and said."""

    @property
    def ignored(self) -> int:
        """Number of files in its folder that are not read."""
        return sum(self.left_out.values())

    @property
    def may_differ(self) -> bool:
        """Whether the field of its text may be another one in a file that has none of that name."""
        return self.template is None and self.field == DEFAULT and not self.strict

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
        found, left_out = _find(config, iterables or {})
        files = []
        stream = None
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
        sources.append(Source(name, config.field, files, left_out, *how))
    return sources


def _reading_of(file: SourceFile, config: SourceConfig) -> tuple[Any, ...]:
    """Return a key that is equal for two sources that read the same text of a file."""
    place = str(file.path.resolve()) if file.local else file.location
    own = tuple(step.model_dump_json() for step in config.clean)  # with other steps a source has other text
    if file.format == "text":
        return place, "text", None, None, own
    return place, file.format, config.field, config.text_template, own, file.delimiter


def _behind_a_limit(file: SourceFile, owner: str, name: str) -> ConfigError:
    return ConfigError(
        f"sources '{owner}' and '{name}' read the same file, and neither would use what lies after the limit of"
        f" '{owner}'",
        where=f"data.sources, {file.location}",
        fix=f"leave the file to one of them, or the limit of '{owner}' out",
    )


def _find(
    config: SourceConfig, iterables: Mapping[str, Any]
) -> tuple[list[SourceFile] | streams.Stream, Mapping[str, int]]:
    """Return a source's files in order, or its stream, and the numbers of files that are left out by kind."""
    if config.path == streams.PREFIX:
        return streams.given_stream(config.name or source_name(config.path), iterables), {}
    if config.path.startswith(streams.PREFIX):
        return streams.function_stream(config.path), {}
    if hub.is_named(config.path):
        _check_has_files(config)
        return _dataset(hub.find_named(config)), {}
    path = hub.local_path(config.path)
    excluded: set[str] = set()

    def is_excluded(name: str) -> bool:
        if not matches(name, config.exclude):
            return False
        excluded.add(name)
        return True

    listing = list_places(path, config.storage_options, lambda name: format_of(config, name) is not None, is_excluded)
    if config.exclude and not excluded:
        warning(f"exclude of {config.path} matches no file: {', '.join(config.exclude)}")
    saved = hub.find_saved(listing.places, config) if listing.kind == "folder" else None
    if saved is not None:
        _check_has_files(config)
        return _dataset(saved), {}
    if config.also and not any(matches(place.name, config.also) for place in listing.places):
        warning(f"also of {config.path} matches no file: {', '.join(config.also)}")
    files = []
    left_out = Counter[str]()
    for place in listing.places:
        kind = format_of(config, place.name)
        if kind is None and listing.kind == "file":
            raise _unknown_file(place)
        if kind is None:
            left_out[kind_of(place.name)] += 1
        else:
            files.append(_file(place, *kind, config))
    if not files:
        raise _nothing_found(config.path, listing, left_out)
    return files, left_out


def _check_has_files(config: SourceConfig) -> None:
    """Check that a dataset is not given settings of files."""
    given = [key for key in ("exclude", "also", "delimiter") if getattr(config, key)]
    if given:
        what = f"{given[0]} is for files, and this is a dataset"
        raise ConfigError(what, where=f"data.sources, {config.path}", fix=f"leave {given[0]} out")


def _unknown_file(place: Place) -> DataError:
    archive = archive_named(place.name)
    if archive is not None:
        what = f"the file is {archive}, not text"
        return DataError(what, where=place.location, fix=unpacking(place.location, archive))
    return DataError(f"the ending of '{place.name}' is no known format {KNOWN}", where=place.location, fix=_SET_FORMAT)


def _dataset(found: hub.Found) -> list[SourceFile] | streams.Stream:
    return found if callable(found) else [SourceFile(**vars(place), format="arrow") for place in found]


def _file(place: Place, kind: str, compression: str | None, config: SourceConfig) -> SourceFile:
    how: dict[str, Any] = {"format": kind, "compression": compression}
    if kind == "csv":
        how |= {"delimiter": delimiter_of(config, place.name), "delimiter_given": config.delimiter is not None}
    return SourceFile(**{**vars(place), **how})


def _nothing_found(path: str, listing: Listing, left_out: Mapping[str, int]) -> DataError:
    fix = "check data.sources"
    if left_out:
        count = sum(left_out.values())
        what = f"none of the {count} files has a known ending {KNOWN}; {describe_left_out(left_out)}"
        fix = _SET_FORMAT
        archives = [place for place in listing.places if archive_named(place.name)]
        if archives:
            fix = unpacking(archives[0].location, archive_named(archives[0].name) or "")
    elif listing.kind == "folder":
        what = "the folder holds no files (hidden ones are not read)"
    else:
        what = "the glob matches no files" if listing.kind == "glob" else "there is no such file or folder"
        local = f"{fix}; paths are relative to the working directory{or_on_hub(path)}"
        fix = missing_fix(path) if is_remote(path) else local
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

    Remote files of another format are opened too if the field of their text must be found. Files of a source with a
    limit are not opened, since the limit may be reached before them.

    Raises:
        ConfigError, DataError: as in `pieces_of`.
    """
    new = [
        (source, file)
        for source in sources
        if source.limit is None
        for file in source.files
        if file not in source._opened and (file.format in TABLES or (not file.local and _has_own_field(source, file)))
    ]
    if not new:
        return
    with progress("opening tables", len(new), "files") as bar, ThreadPoolExecutor(min(_OPENED, len(new))) as pool:
        for _ in pool.map(_open, *zip(*new, strict=True)):
            bar.advance()


def _open(source: Source, file: SourceFile) -> _Opened:
    """Return what the present content of a file shows."""
    stamp = stamp_of(file) if file.local else ""  # for a remote file, `file` itself holds the version
    known = source._opened.get(file)
    if known is None or known.stamp != stamp:
        known = source._opened[file] = _look_into(source, file, stamp)
        _say_field(source, file, known.field)
    return known


def _look_into(source: Source, file: SourceFile, stamp: str) -> _Opened:
    if file.format in TABLES:
        if not file.bytes:
            return _Opened(stamp, source.field, [])  # like any other empty file
        spans_of = parquet_spans if file.format == "parquet" else arrow_spans
        return _Opened(stamp, *spans_of(file, source.field, source.template, PIECE_BYTES, source.may_differ))
    fields: Mapping[str, bool] = {}
    if source.may_differ and file.format == "jsonl" and begins_with_field(file, DEFAULT):
        return _Opened(stamp, DEFAULT, [])
    if source.may_differ and file.format == "csv":
        names, *rows = first_rows(file, _FIRST_ROWS, source.most) or [[]]
        fields = fields_of_rows(names, rows)
    elif source.may_differ:
        fields = fields_of_records(record for _, record in first_records(file, source.most))
    field = guessed_field(fields)
    whole = _may_be_cut(file) and _is_foreseen(file) and must_be_whole(file)
    return _Opened(stamp, field or source.field, [], DEFAULT in fields or field is not None, whole)


def _say_field(source: Source, file: SourceFile, field: str) -> None:
    if field != source.field and field not in source._said:
        source._said.add(field)
        notice(
            f"{source.name}: {file.name} has no field '{source.field}': the text of this file and of others like it"
            f" is read from '{field}'"
        )


def _has_own_field(source: Source, file: SourceFile) -> bool:
    """Return whether a file is opened for the field of its text.

    Of remote files, each of which takes a request, all are if the first of them has no field of that name.
    """
    if not source.may_differ or file.format not in ("jsonl", "csv") or not file.bytes:
        return False
    first = next(other for other in source.files if other.format == file.format and other.bytes)
    return file.local or file == first or _open(source, first).field != source.field


def _file_pieces(number: int, source: Source, file: SourceFile) -> Iterator[Piece]:
    try:
        field = source.field
        if file.format in TABLES or _has_own_field(source, file):
            field = _open(source, file).field
        spans = list(_spans(source, file))
    except DataError as error:
        if source.limit is None:
            raise
        # The limit may be reached before this file, and then its error does not matter.
        yield Piece(number, file, source.field, None, file.bytes, source.template, problem=error, most=source.most)
        return
    if field != source.field:
        file = dataclasses.replace(file, field=field)
    for span, size in spans:
        yield Piece(number, file, field, span, size, source.template, most=source.most)


def _spans(source: Source, file: SourceFile) -> Iterator[tuple[tuple[int, int] | None, int]]:
    """Yield the parts of a file, each with its bytes."""
    if file.format in TABLES:
        if file not in source._opened:
            open_tables([source])
        yield from _open(source, file).spans
    elif _may_be_cut(file) and not (_is_foreseen(file) and _open(source, file).whole):
        for start in range(0, file.bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, file.bytes)
            yield (start, end), end - start
    else:
        yield None, file.bytes


def longest_piece(sources: Sequence[Source]) -> int:
    """Estimate the bytes of the largest piece that a worker must process; 0 if there are only streams."""
    files = (file for source in sources for file in source.files)
    return max((PIECE_BYTES if file.format in TABLES or _may_be_cut(file) else file.bytes for file in files), default=0)


def _is_foreseen(file: SourceFile) -> bool:
    """Return whether a file is opened to see whether it has lines: a remote one only if its name leaves that open."""
    return file.local or file.name.lower().endswith(".json")


def _may_be_cut(file: SourceFile) -> bool:
    return file.format == "jsonl" and not file.compression and file.bytes > PIECE_BYTES and file.ranges


def _stream_pieces(number: int, source: Source) -> Iterator[Piece]:
    assert source.stream is not None
    file = SourceFile(source.location, source.name, 0, local=False, ranges=False, format="stream")
    fields = source.field, source.template
    batches = streams.read_stream(
        source.location, source.stream, *fields, size=PIECE_BYTES, limit=source.limit, most=source.most
    )
    for batch, size in batches:
        texts = tuple(batch.texts)
        bad = tuple(batch.bad)
        empty = tuple(batch.empty.items())
        yield Piece(number, file, source.field, None, size, source.template, texts, bad, empty)


def _check_first_records(source: Source) -> None:
    """Check that some of a source's first records have the fields.

    If none has, the config is wrong, and skipping malformed documents would yield an empty corpus.

    Raises:
        DataError: none of the first records has the fields.
    """
    first = next((file for file in source.files if file.bytes), None)
    if first is None or first.format != "jsonl" or (source.may_differ and _open(source, first).has_field):
        return
    complaint = first_complaint(first, source.field, source.template, source.most)
    if complaint is None:
        return
    fix = "name fields in the template that are there"
    if source.template is None:
        fix = field_fix([*fields_of_records(record for _, record in first_records(first, source.most))])
    elif source.template in LAYOUTS:
        fix = f"rename the fields, or leave format: {source.template[:-1]} out"
    raise DataError(complaint.reason, where=complaint.where, fix=fix)

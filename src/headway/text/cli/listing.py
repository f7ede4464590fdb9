"""`headway data prepare --dry-run`: the files that would be read, and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.core.command_line import print_json, print_table
from headway.core.console import print_line, print_lines
from headway.core.format import UNKNOWN, counted, format_bytes
from headway.text.preparing.units import units_of
from headway.text.reading.endings import describe_left_out
from headway.text.reading.sources import find_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.config.sections.data import DataConfig
    from headway.text.preparing.clusters import DataPool
    from headway.text.reading.places import SourceFile
    from headway.text.reading.sources import Source


def list_sources(settings: DataConfig, json: bool, pool: DataPool | None) -> None:
    """Print the files of all sources, and what a cluster would get; only lengths and tables' footers are read.

    Raises:
        DataError: a source has no files, or cannot be reached.
    """
    sources = find_sources(settings.sources, most=settings.max_document_bytes)
    submitted = None if pool is None else pool.describe(_units(settings, sources))
    if json:
        facts = [_facts(source) for source in sources]
        print_json(facts if submitted is None else {"sources": facts, "submitted": submitted})
        return
    rows = [row for source in sources for row in _rows(source)]
    print_table(["SOURCE", "FORMAT", "SIZE", "FILE"], rows, numeric=[2])
    for source, config in zip(sources, settings.sources, strict=True):
        size = format_bytes(sum(file.bytes for file in source.files))
        ignored = f", {describe_left_out(source.left_out)}" if source.left_out else ""
        limit = f", at most {config.limit} read" if config.limit else ""
        files = counted(len(source.files), "file")
        what = "a stream of unknown length" if source.stream else f"{files}, {size}"
        print_line(f"{source.name}: {what}{limit}{ignored}")
    print_line(f"would be written to {settings.store}")
    if submitted is not None:
        print_lines(submitted)


def _units(settings: DataConfig, sources: Sequence[Source]) -> int:
    """Return the number of units that other machines can process."""
    return sum(
        1
        for number, source in enumerate(sources)
        if source.stream is None and source.limit is None
        for _ in units_of(number, source, settings.shard_bytes)
    )


def _rows(source: Source) -> list[list[str]]:
    if source.stream:
        return [[source.name, "stream", UNKNOWN, source.location]]
    return [[source.name, _format(file), format_bytes(file.bytes), file.location] for file in source.files]


def _format(file: SourceFile) -> str:
    return ".".join(filter(None, (file.format, file.compression)))


def _facts(source: Source) -> dict[str, Any]:
    files = [
        {
            "path": file.location,
            "format": file.format,
            "compression": file.compression,
            "bytes": file.bytes,
            **({} if file.local else {"version": file.version}),
        }
        for file in source.files
    ]
    stream = {"stream": source.location} if source.stream else {}
    left_out = {"ignored_files": source.ignored, "left_out": dict(source.left_out)}
    return {"name": source.name, **left_out, "files": files, **stream}

"""`headway data prepare --dry-run`: the files that would be read, and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.cli.common import print_json, print_table
from headway.core.console import print_line

if TYPE_CHECKING:
    from headway.config.data import DataConfig
    from headway.data.reading.places import SourceFile
    from headway.data.reading.sources import Source


def list_sources(settings: DataConfig, json: bool) -> None:
    """Print the files of all sources; only their lengths are read.

    Raises:
        DataError: a source has no files, or cannot be reached.
    """
    from headway.core.format import counted, format_bytes
    from headway.data.reading.sources import find_sources

    sources = find_sources(settings.sources, most=settings.max_document_bytes)
    if json:
        print_json([_facts(source) for source in sources])
        return
    rows = [row for source in sources for row in _rows(source)]
    print_table(["SOURCE", "FORMAT", "SIZE", "FILE"], rows, numeric=[2])
    for source, config in zip(sources, settings.sources, strict=True):
        size = format_bytes(sum(file.bytes for file in source.files))
        ignored = f", {source.ignored} of unknown format ignored" if source.ignored else ""
        limit = f", at most {config.limit} read" if config.limit else ""
        files = counted(len(source.files), "file")
        what = "a stream of unknown length" if source.stream else f"{files}, {size}"
        print_line(f"{source.name}: {what}{ignored}{limit}")
    print_line(f"would be written to {settings.store}")


def _rows(source: Source) -> list[list[str]]:
    from headway.core.format import UNKNOWN, format_bytes

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
    return {"name": source.name, "ignored_files": source.ignored, "files": files, **stream}

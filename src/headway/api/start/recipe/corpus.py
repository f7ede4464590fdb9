"""The text of a folder: its files by ending, what is left out, and its size."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from headway.config.sections.data import SourceConfig
from headway.core.format import counted
from headway.text.reading.endings import TEXT_PATTERNS, describe_left_out, format_of, kind_of, matches
from headway.text.reading.places import Place, list_places
from headway.text.reading.sources import find_sources

#: Endings that a line names.
_NAMED = 6
#: Endings of files that hold many documents, and of those that have no lines.
_RECORDS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc")
_WHOLE = _RECORDS[4:]
_FEW_FILES = 5
#: Files of a sample, and bytes of each: about as much as a second of preparation takes.
_SAMPLED_FILES = 40
_SAMPLED_BYTES = 200_000


@dataclass(frozen=True)
class Corpus:
    """A folder, or one file, with the text in it."""

    path: str
    kinds: dict[str, int]
    """Files that are read, by ending."""
    left_out: dict[str, int]
    bytes: int
    """Size of the files that are read."""
    also: tuple[str, ...]
    """Patterns of what is read although a source leaves it out by default."""
    files: tuple[Place, ...] = field(repr=False)
    """Those that are read, by name."""

    @property
    def name(self) -> str:
        """The name of a run on it."""
        stem = Path(self.path).resolve().stem if Path(self.path).is_file() else Path(self.path).resolve().name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"

    def source(self, limit: int | None) -> dict[str, Any]:
        """Return the entry of `data.sources`, which reads at most `limit` bytes."""
        source = self._source(self.path)
        if limit is not None and self.readable(limit) < self.bytes:
            source["limit"] = f"{self.readable(limit)} bytes"
        return source

    def _source(self, path: str) -> dict[str, Any]:
        return {"path": path, "also": list(self.also)} if self.also else {"path": path}

    def readable(self, limit: int) -> int:
        """Return the bytes that a limit lets through: a limit drops documents whole, and so must not cut the first."""
        first = self.files[0]
        least = first.bytes + 1 if kind_of(first.name) not in _RECORDS else 0
        return min(self.bytes, max(limit, least))

    @property
    def is_one_piece(self) -> bool:
        """Whether there are too few documents to hold some out: each file of plain text is one."""
        return len(self.files) < _FEW_FILES and not any(kind_of(file.name) in _RECORDS for file in self.files)

    def sample(self, folder: Path) -> dict[str, Any]:
        """Write the beginnings of files spread over the text into a folder, and return that as a source.

        Files that cannot be cut between lines, such as Parquet, are left out; without any other the source is the text
        itself, up to a limit.
        """
        folder.mkdir()
        step = max(1, len(self.files) // _SAMPLED_FILES)
        for number, file in enumerate(self.files[::step]):
            kind = PurePath(file.name).suffix.lower()
            if file.bytes and kind_of(file.name) == kind and kind not in _WHOLE:
                with Path(file.location).open("rb") as source:
                    head = source.read(_SAMPLED_BYTES)
                    if source.read(1):
                        head = head[: head.rfind(b"\n") + 1] or head
                (folder / f"{number:04d}{kind}").write_bytes(head)
        if not any(folder.iterdir()):
            return self.source(_SAMPLED_FILES * _SAMPLED_BYTES)
        return self._source(str(folder))

    def describe(self) -> str:
        """Say what is read and what is left out, in one line."""
        names = sorted(self.kinds, key=lambda kind: (-self.kinds[kind], kind))
        named = ", ".join(f"{self.kinds[kind]:,} {kind}" for kind in names[:_NAMED])
        more = f", {len(names) - _NAMED} other kinds" if len(names) > _NAMED else ""
        size = f"{self.bytes / 1e6:,.1f} MB of text in {counted(sum(self.kinds.values()), 'file')}"
        left = f"; {describe_left_out(self.left_out)}" if self.left_out else ""
        return f"{size} ({named}{more}){left}"


def is_text(path: Path) -> bool:
    """Return whether a path is a folder, or a file of text by its ending, and so no config."""
    return path.is_dir() or (path.is_file() and format_of(SourceConfig(path=str(path)), path.name) is not None)


def look(path: str) -> Corpus:
    """Look at a folder: documents, and unlike by default also markup and code.

    Raises:
        DataError: there is no text, or a file cannot be read.
    """
    config = SourceConfig(path=path, also=list(TEXT_PATTERNS))
    listing = list_places(path, {}, lambda name: format_of(config, name) is not None)
    files = tuple(place for place in listing.places if format_of(config, place.name) is not None)
    kinds = Counter(kind_of(place.name) for place in files)
    left_out = Counter(kind_of(place.name) for place in listing.places)
    left_out.subtract(kinds)
    size = sum(place.bytes for place in files)
    plain = SourceConfig(path=path)
    if not size:
        find_sources([plain])  # says why
    extra = [place.name for place in files if format_of(plain, place.name) is None]
    also = tuple(pattern for pattern in TEXT_PATTERNS if any(matches(name.lower(), [pattern]) for name in extra))
    return Corpus(path, dict(kinds), dict(+left_out), size, also, files)

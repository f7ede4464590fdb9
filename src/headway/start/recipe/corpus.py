"""The text of a folder: its files by ending, what is left out, and its size."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.sections.data import SourceConfig
from headway.core.format import counted
from headway.text.reading.endings import TEXT_PATTERNS, describe_left_out, format_of, kind_of, matches
from headway.text.reading.places import list_places
from headway.text.reading.sources import find_sources

#: Endings that a line names.
_NAMED = 6


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

    @property
    def name(self) -> str:
        """The name of a run on it."""
        stem = Path(self.path).resolve().stem if Path(self.path).is_file() else Path(self.path).resolve().name
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"

    def source(self, limit: int | None) -> dict[str, Any]:
        """Return the entry of `data.sources`, which reads at most `limit` bytes."""
        source: dict[str, Any] = {"path": self.path}
        if self.also:
            source["also"] = list(self.also)
        if limit is not None and limit < self.bytes:
            source["limit"] = f"{limit} bytes"
        return source

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
    kinds, left_out, size = Counter[str](), Counter[str](), 0
    for place in listing.places:
        if format_of(config, place.name) is None:
            left_out[kind_of(place.name)] += 1
        else:
            kinds[kind_of(place.name)] += 1
            size += place.bytes
    if not size:
        find_sources([SourceConfig(path=path)])  # says why
    plain = SourceConfig(path=path)
    extra = [place.name for place in listing.places if format_of(plain, place.name) is None]
    also = tuple(pattern for pattern in TEXT_PATTERNS if any(matches(name.lower(), [pattern]) for name in extra))
    return Corpus(path, dict(kinds), dict(left_out), size, also)

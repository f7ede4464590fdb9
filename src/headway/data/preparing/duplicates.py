"""The search for duplicates among all units, and what it means for each document that was read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.config.data import DedupConfig
from headway.core.console import Progress
from headway.data.preparing.encode import Verdict
from headway.data.reading.readers import read_batches
from headway.data.reading.sources import Piece

if TYPE_CHECKING:
    from headway.data.dedup.fingerprints import Prints

# Characters of a document that a message shows.
_EXCERPT = 80
# What the stages of the search count.
_UNITS = {"equal documents": "documents", "similar documents": "bands", "equal paragraphs": "paragraphs"}


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        report: Plain JSON: what was removed, clusters, shares.
        verdicts: Per unit.
    """

    report: dict[str, Any]
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Texts:
    """The documents that are searched, for messages.

    Attributes:
        pieces: Per unit.
        cleaned: Per unit and document read: whether it went through the cleaning.
    """

    pieces: Sequence[Sequence[Piece]]
    cleaned: Sequence[NDArray[np.bool_]]

    def describe(self, unit: int, document: int) -> str:
        """Where a document lies and how it begins; `document` counts those that went through the cleaning."""
        number = left = int(np.flatnonzero(self.cleaned[unit])[document])
        for piece in self.pieces[unit]:
            for batch in read_batches(piece):
                if left < len(batch.texts):
                    return f"{piece.file.location}: {batch.texts[left][:_EXCERPT]!r}"
                left -= len(batch.texts)
        return f"document {number} of {self.pieces[unit][0].file.location}"


class _Line:
    """Shows how far the search is: each stage for itself, since what it counts is its own."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def tell(self, stage: str, done: int, total: int) -> None:
        """So much of a stage is done."""
        label = f"searching for {stage}"
        if self._bar is None or self._bar.label != label:
            self.close()
            self._bar = Progress(label, unit=_UNITS[stage])
        self._bar.total = total
        self._bar.advance(done - self._bar.done)

    def close(self) -> None:
        """Take the line away."""
        if self._bar is not None:
            self._bar.finish()


def search(
    prints: Sequence[Prints],
    cleaned: Sequence[NDArray[np.bool_]],
    sources: Sequence[str],
    config: DedupConfig,
    texts: Texts,
    scratch: Path,
) -> Found:
    """Search all units' documents for duplicates.

    Args:
        prints: Per unit, of the documents that went through the cleaning.
        cleaned: Per unit and document read: whether it did.
        sources: Name of each unit's source.
        config: What counts as a duplicate, and the limits.
        texts: The documents, for messages.
        scratch: Folder for what does not fit into memory.

    Raises:
        DataError: a safety gate refuses what would be removed.
    """
    from headway.data.dedup import find_duplicates

    with closing(_Line()) as line:
        found = find_duplicates(prints, sources, config, describe=texts.describe, progress=line.tell, scratch=scratch)
    verdicts = []
    for number, (part, through) in enumerate(zip(prints, cleaned, strict=True)):
        keep = np.array(through, dtype=bool)
        stay = found.keep[number]
        keep[keep] = stay
        paragraphs = found.paragraph_keep[number]
        if paragraphs is None:
            verdicts.append(Verdict(keep))
        else:
            counts = np.asarray(part.paragraph_counts)
            verdicts.append(Verdict(keep, paragraphs[np.repeat(stay, counts)], counts[stay]))
    return Found(found.report, verdicts)

"""The search for duplicates among all units, and its verdict on each document that was read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DedupConfig
from headway.core.console import Progress
from headway.text.dedup import find_duplicates
from headway.text.preparing.pieces import Verdict
from headway.text.reading.readers import read_batches
from headway.text.reading.sources import Piece

if TYPE_CHECKING:
    from headway.text.dedup.fingerprints import Prints

# Characters of a document that a message shows.
_EXCERPT = 80
# The unit that each stage of the search counts.
_UNITS = {"equal documents": "documents", "similar documents": "bands", "equal paragraphs": "paragraphs"}


@dataclass(frozen=True)
class Texts:
    """The documents of the search, for messages.

    Attributes:
        pieces: The pieces of each unit.
        cleaned: Per unit and document read, whether the document passed the cleaning.
    """

    pieces: Sequence[Sequence[Piece]]
    cleaned: Sequence[NDArray[np.bool_]]

    def describe(self, unit: int, document: int) -> str:
        """Return where a document lies and how it begins; `document` counts those that passed the cleaning."""
        number = left = int(np.flatnonzero(self.cleaned[unit])[document])
        for piece in self.pieces[unit]:
            for batch in read_batches(piece):
                if left < len(batch.texts):
                    return f"{piece.file.location}: {batch.texts[left][:_EXCERPT]!r}"
                left -= len(batch.texts)
        return f"document {number} of {self.pieces[unit][0].file.location}"


class _SearchProgress:
    """Shows the progress of the search; each stage has its own bar, since it counts in its own unit."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def update(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done."""
        label = f"searching for {stage}"
        if self._bar is None or self._bar.label != label:
            self.close()
            self._bar = Progress(label, unit=_UNITS[stage])
        self._bar.total = total
        self._bar.advance(done - self._bar.done)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.finish()


def search(
    prints: Sequence[Prints],
    cleaned: Sequence[NDArray[np.bool_]],
    sources: Sequence[str],
    config: DedupConfig,
    *,
    texts: Texts,
    scratch: Path,
) -> tuple[dict[str, Any], list[Verdict]]:
    """Search all units' documents for duplicates.

    Args:
        prints: Per unit, the fingerprints of the documents that passed the cleaning.
        cleaned: Per unit and document read, whether the document passed the cleaning.
        sources: Name of each unit's source.
        config: The definition of a duplicate, and the limits.
        texts: The documents, for messages.
        scratch: Folder for data that does not fit into memory.

    Returns:
        The report as plain JSON (removed documents, clusters, shares), and the verdict on each unit.

    Raises:
        DataError: A safety limit rejects the removal.
    """
    with closing(_SearchProgress()) as shown:
        found = find_duplicates(
            prints, sources, config, describe=texts.describe, progress=shown.update, scratch=scratch
        )
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
    return found.report, verdicts

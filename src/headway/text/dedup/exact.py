"""Search for equal documents and paragraphs, in memory that does not grow with their number.

Hashes are uniformly distributed, so a corpus of any size is processed one range of hashes at a time, each small enough
to sort in memory. If many equal hashes fall into a range, duplicates are dropped as it fills: one of each is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.text.dedup.corpus import Corpus
from headway.text.dedup.workspace import RowProgress, Rows, Workspace, group_starts, make_rows, thinned


def mark_equal_documents(
    corpus: Corpus, kept_copy: NDArray[np.int64], workspace: Workspace, progress: RowProgress | None = None
) -> None:
    """Find documents with equal text, and keep the one with the lowest number of each set.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), each document's own number. The entries of removed documents are set to the
            number of the kept one.
        workspace: Limits the memory.
        progress: Called with the number of documents done and in total.
    """

    def blocks() -> Iterator[Rows]:
        for start, hashes in corpus.blocks("hashes"):
            yield make_rows(hashes[:, 0], hashes[:, 1], np.arange(start, start + len(hashes)))

    def thin(rows: Rows) -> Rows:
        # The sort is stable and numbers are ascending, so the first row of a group has the lowest number.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        starts = group_starts(rows[:, :2])
        numbers = rows[:, 2].astype(np.int64)
        kept_copy[numbers[~starts]] = numbers[starts][np.cumsum(starts) - 1][~starts]
        return rows[starts]

    with workspace.partition(blocks, corpus.count, 3, progress) as partition:
        for part in range(partition.parts):
            thinned(partition.read(part), workspace.rows, thin, width=3)


def count_paragraphs(corpus: Corpus) -> int:
    """Count the paragraphs of all documents."""
    return sum(len(prints.paragraph_hashes) for _, _, _, prints in corpus.units())


def mark_equal_paragraphs(
    corpus: Corpus, kept_copy: NDArray[np.int64], workspace: Workspace, progress: RowProgress | None = None
) -> NDArray[np.bool_]:
    """Find paragraphs with equal text in kept documents.

    One paragraph of each set is kept: the first one in the document with the smallest hash, of the first source that
    has it. So the choice does not depend on the order of files.

    Returns:
        bool (paragraphs,), unit by unit in the corpus's order: whether to remove a paragraph.
    """
    count = count_paragraphs(corpus)
    dropped = workspace.table(count, np.bool_)

    def thin(rows: Rows) -> Rows:
        rows = rows[np.lexsort((rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
        starts = group_starts(rows[:, 0])
        dropped[rows[~starts, 3].astype(np.int64)] = True
        return rows[starts]

    with workspace.partition(lambda: _paragraph_rows(corpus, kept_copy), count, 4, progress) as partition:
        for part in range(partition.parts):
            thinned(partition.read(part), workspace.rows, thin, width=4)
    return dropped


def _paragraph_rows(corpus: Corpus, kept_copy: NDArray[np.int64]) -> Iterator[Rows]:
    """Yield hash, source, document hash and number of paragraphs that are long enough, in kept documents."""
    first = 0
    for _, source, start, prints in corpus.units():
        hashes = prints.paragraph_hashes
        counts = prints.paragraph_counts
        kept = kept_copy[start : start + len(prints)] == np.arange(start, start + len(prints))
        inside = np.flatnonzero(np.repeat(kept, counts) & (hashes != 0))
        documents = np.repeat(np.asarray(prints.hashes[:, 0]), counts)
        yield make_rows(hashes[inside], np.full(len(inside), source), documents[inside], inside + first)
        first += len(hashes)

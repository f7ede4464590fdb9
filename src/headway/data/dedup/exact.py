"""Equal documents and equal paragraphs, in memory that does not grow with their number.

Hashes are spread evenly, so a corpus of any size is worked on one range of hashes at a time, each small enough to be
sorted in memory. A range that many equal hashes fall into is thinned as it fills: one of each is enough to go on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.data.dedup.corpus import Corpus
from headway.data.dedup.workspace import Rows, Told, Workspace, group_starts, make_rows, thinned


def mark_equal_documents(
    corpus: Corpus, kept_copy: NDArray[np.int64], workspace: Workspace, progress: Told | None = None
) -> None:
    """Find documents with equal text; of each set the one with the lowest number is kept.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), each document's own number; those of documents that go are set to the number of
            the one that is kept instead.
        workspace: Bounds the memory.
        progress: Told how many documents are done.
    """

    def blocks() -> Iterator[Rows]:
        for start, hashes in corpus.blocks("hashes"):
            yield make_rows(hashes[:, 0], hashes[:, 1], np.arange(start, start + len(hashes)))

    def thin(rows: Rows) -> Rows:
        # The sort is stable and numbers come ascending, so the first of a group has the lowest.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        starts = group_starts(rows[:, :2])
        numbers = rows[:, 2].astype(np.int64)
        kept_copy[numbers[~starts]] = numbers[starts][np.cumsum(starts) - 1][~starts]
        return rows[starts]

    with workspace.partition(blocks, corpus.count, 3, progress) as partition:
        for part in range(partition.parts):
            thinned(partition.read(part), workspace.rows, thin, width=3)


def count_paragraphs(corpus: Corpus) -> int:
    """Paragraphs of all documents."""
    return sum(len(prints.paragraph_hashes) for _, _, _, prints in corpus.units())


def mark_equal_paragraphs(
    corpus: Corpus, kept_copy: NDArray[np.int64], workspace: Workspace, progress: Told | None = None
) -> NDArray[np.bool_]:
    """Find paragraphs with equal text in documents that are kept.

    One of each set stays: in the first source that has it, the document with the smallest hash, and there the first.
    So which one it is does not depend on the order of files.

    Returns:
        bool (paragraphs,), unit by unit in the corpus's order: whether a paragraph goes.
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
    """Hash, source, the document's hash and number of paragraphs that are long enough, of documents that are kept."""
    first = 0
    for _, source, start, prints in corpus.units():
        hashes, counts = prints.paragraph_hashes, prints.paragraph_counts
        kept = kept_copy[start : start + len(prints)] == np.arange(start, start + len(prints))
        inside = np.flatnonzero(np.repeat(kept, counts) & (hashes != 0))
        documents = np.repeat(np.asarray(prints.hashes[:, 0]), counts)
        yield make_rows(hashes[inside], np.full(len(inside), source), documents[inside], inside + first)
        first += len(hashes)

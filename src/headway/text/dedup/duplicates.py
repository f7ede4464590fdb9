"""Search for duplicate documents and paragraphs, and the decision which of them to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DedupConfig
from headway.text.dedup.clusters import mark_similar_documents
from headway.text.dedup.corpus import Corpus
from headway.text.dedup.exact import mark_equal_documents, mark_equal_paragraphs
from headway.text.dedup.fingerprints import Prints
from headway.text.dedup.gates import check_limits
from headway.text.dedup.minhash import Layout
from headway.text.dedup.report import count_clusters, empty_counts, whole_report
from headway.text.dedup.workspace import Workspace

#: Called with the name of a stage, and the numbers of documents, bands or paragraphs done and in total.
Progress = Callable[[str, int, int], None]

MEMORY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Duplicates:
    """The documents and paragraphs to keep.

    Attributes:
        keep: For each unit bool (documents,): whether to keep the document.
        paragraph_keep: For each unit bool (paragraphs,), the paragraphs of all its documents in order, or None if all
            of them are kept. The paragraphs of removed documents are marked as kept.
        report: The findings as plain JSON; see docs/deduplication.md.
    """

    keep: list[NDArray[np.bool_]]
    paragraph_keep: list[NDArray[np.bool_] | None]
    report: dict[str, Any]


def find_duplicates(
    prints: Sequence[Prints],
    sources: Sequence[str],
    config: DedupConfig,
    *,
    describe: Callable[[int, int], str] | None = None,
    progress: Progress | None = None,
    memory_bytes: int = MEMORY_BYTES,
    scratch: Path | None = None,
) -> Duplicates:
    """Decide which documents and paragraphs to keep.

    Equal documents are removed first, then near-duplicates among the rest, then paragraphs of the rest. Among
    duplicates, the document of the first source is kept, then the longest, then the one with the smallest hash. So the
    kept texts depend neither on the division of input into units nor on the order of files within a source.

    Args:
        prints: Prints of each unit, in input order, made with the same config.
        sources: Each unit's source; sources take precedence in the order in which they first appear.
        config: Kinds of duplicates to remove, and the limits.
        describe: Returns a place and an excerpt for a unit and a document's number in it, for messages.
        progress: Called as work advances.
        memory_bytes: Limit of the working arrays. It excludes the result (a byte for each document and paragraph) and
            the arrays of one unit.
        scratch: Folder for scratch files of at most 60 bytes for each document and 33 for each paragraph; the system's
            temporary folder if None.

    Raises:
        DataError: more would be removed than the config allows (`TooManyDuplicates`).
        ValueError: the prints were made with another config.
    """
    corpus = Corpus(prints, sources)
    _check_prints(corpus, config)
    tell = progress or (lambda stage, done, total: None)
    with closing(corpus), Workspace(memory_bytes, scratch) as workspace:
        kept_copy = workspace.table(corpus.count, np.int64)
        for start, stop in corpus.ranges():
            kept_copy[start:stop] = np.arange(start, stop)
        counts = {name: empty_counts() for name in corpus.names}
        if config.documents or config.near:
            mark_equal_documents(corpus, kept_copy, workspace, partial(tell, "equal documents"))
            _count(corpus, kept_copy, counts, "exact")
        if config.near:
            tell("similar documents", 0, config.bands)
            mark_similar_documents(
                corpus, kept_copy, config, workspace, lambda band: tell("similar documents", band, config.bands)
            )
            _count(corpus, kept_copy, counts, "near")
        paragraph_keep: list[NDArray[np.bool_] | None] = [None] * len(prints)
        emptied = workspace.table(corpus.count, np.bool_)
        if config.paragraphs:
            dropped = mark_equal_paragraphs(corpus, kept_copy, workspace, partial(tell, "equal paragraphs"))
            _drop_paragraphs(corpus, dropped, emptied, paragraph_keep, counts)
        keep: list[NDArray[np.bool_]] = [np.zeros(0, dtype=bool)] * len(prints)
        for unit, source, start, each in corpus.units():
            stop = start + len(each)
            keep[unit] = np.asarray((kept_copy[start:stop] == np.arange(start, stop)) & ~emptied[start:stop])
            _count_unit(counts[corpus.names[source]], keep[unit], each)
        clusters = count_clusters(corpus, kept_copy, workspace)
    report = whole_report(counts, clusters, config)
    check_limits(report, config, describe)
    return Duplicates(keep, paragraph_keep, report)


def _check_prints(corpus: Corpus, config: DedupConfig) -> None:
    """Check that the prints fit the config; otherwise the comparison would be silently wrong."""
    layout = Layout.of(config)
    wanted = (layout.bands, layout.columns) if config.near else None
    for unit, _, _, prints in corpus.units():
        if wanted and (prints.bands.shape[0], prints.signatures.shape[1]) != wanted:
            raise ValueError(f"the prints of unit {unit} were made with other bands or rows")
        if config.paragraphs and len(prints) and not len(prints.paragraph_hashes):
            raise ValueError(f"the prints of unit {unit} were made without paragraphs")


def _count(corpus: Corpus, kept_copy: NDArray[np.int64], counts: dict[str, dict[str, int]], kind: str) -> None:
    """Add the documents that the latest stage removed to the counts of a kind of duplicates."""
    for _, source, start, prints in corpus.units():
        gone = int((kept_copy[start : start + len(prints)] != np.arange(start, start + len(prints))).sum())
        counts[corpus.names[source]][kind] += gone
    if kind == "near":
        for each in counts.values():
            each["near"] -= each["exact"]


def _drop_paragraphs(
    corpus: Corpus,
    dropped: NDArray[np.bool_],
    emptied: NDArray[np.bool_],
    paragraph_keep: list[NDArray[np.bool_] | None],
    counts: dict[str, dict[str, int]],
) -> None:
    """Set each unit's mask of paragraphs, and mark documents without a remaining paragraph in `emptied`, bool (n,)."""
    first = 0
    for unit, source, start, prints in corpus.units():
        per_document = np.asarray(prints.paragraph_counts)
        mask = np.asarray(dropped[first : first + len(prints.paragraph_hashes)])
        first += len(mask)
        each = counts[corpus.names[source]]
        each["paragraphs"] += len(mask)
        if not mask.any():
            continue
        owners = np.repeat(np.arange(len(prints)), per_document)
        gone = np.bincount(owners[mask], minlength=len(prints)) == per_document
        emptied[start : start + len(prints)] = gone & (per_document > 0)
        paragraph_keep[unit] = ~mask
        each["paragraphs_removed"] += int(mask.sum())
        each["emptied"] += int(emptied[start : start + len(prints)].sum())


def _count_unit(counts: dict[str, int], keep: NDArray[np.bool_], prints: Prints) -> None:
    sizes = np.asarray(prints.sizes)
    counts["documents"] += len(keep)
    counts["bytes"] += int(sizes.sum())
    counts["removed"] += len(keep) - int(keep.sum())
    counts["removed_bytes"] += int(sizes[~keep].sum())

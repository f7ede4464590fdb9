"""Search for duplicate documents and paragraphs, and the decision which of them to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.sections.data import DedupConfig
from headway.core.arrays import Bools, Ints
from headway.text.dedup.clusters import compare, mark_similar_documents
from headway.text.dedup.corpus import Corpus
from headway.text.dedup.fingerprints import Prints
from headway.text.dedup.gates import check_limits
from headway.text.dedup.minhash import Layout, collision_probability
from headway.text.dedup.workspace import RowProgress, Rows, Workspace, group_starts, make_rows

#: Called with the name of a stage, and the numbers of documents, bands or paragraphs done and in total.
Progress = Callable[[str, int, int], None]

MEMORY_BYTES = 256 * 2**20
# Largest clusters shown as examples, and removed documents shown of each.
_CLUSTERS = 5
_DOCUMENTS = 5


def mark_equal_documents(corpus: Corpus, kept_copy: Ints, workspace: Workspace, progress: RowProgress) -> None:
    """Find documents with equal text, and keep the one with the lowest number of each set.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), each document's own number. The entries of removed documents are set to the
            number of the kept one.
        workspace: Limits the memory.
        progress: Called with the number of documents done and in total.
    """

    def blocks() -> Iterator[Rows]:
        for start, hashes in corpus.blocks(lambda prints: prints.hashes):
            yield make_rows(hashes[:, 0], hashes[:, 1], np.arange(start, start + len(hashes)))

    def thin(rows: Rows) -> Rows:
        # The sort is stable and numbers are ascending, so the first row of a group has the lowest number.
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        starts = group_starts(rows[:, :2])
        numbers = rows[:, 2].astype(np.int64)
        kept_copy[numbers[~starts]] = numbers[starts][np.cumsum(starts) - 1][~starts]
        return rows[starts]

    workspace.thin(blocks, corpus.count, 3, thin, progress)


def count_paragraphs(corpus: Corpus) -> int:
    """Count the paragraphs of all documents."""
    return sum(len(prints.paragraph_hashes) for _, _, _, prints in corpus.units())


def mark_equal_paragraphs(corpus: Corpus, kept_copy: Ints, workspace: Workspace, progress: RowProgress) -> Bools:
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

    workspace.thin(partial(_paragraph_rows, corpus, kept_copy), count, 4, thin, progress)
    return dropped


def _paragraph_rows(corpus: Corpus, kept_copy: Ints) -> Iterator[Rows]:
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


def empty_counts() -> dict[str, int]:
    """Return zero counts for a source."""
    names = ("documents", "bytes", "exact", "near", "emptied", "removed", "removed_bytes")
    return dict.fromkeys((*names, "paragraphs", "paragraphs_removed"), 0)


def count_clusters(corpus: Corpus, kept_copy: Ints, workspace: Workspace) -> dict[str, Any]:
    """Count the clusters of duplicate documents, and describe the largest ones.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), the number of the document kept in place of each. Entries that refer to a removed
            document are redirected to the kept one.
        workspace: Limits the memory.
    """
    sizes = workspace.table(corpus.count, np.int64)
    for start, stop in corpus.ranges():
        kept_copy[start:stop] = kept_copy[kept_copy[start:stop]]
        np.add.at(sizes, kept_copy[start:stop], 1)
    count = 0
    largest = np.zeros(0, dtype=np.int64)
    for start, stop in corpus.ranges():
        found = start + np.flatnonzero(sizes[start:stop] > 1)
        count += len(found)
        largest = np.concatenate([largest, found])
        largest = largest[np.lexsort((largest, -sizes[largest]))][:_CLUSTERS]
    examples = [_example(corpus, kept_copy, int(leader), int(sizes[leader]), workspace) for leader in largest]
    return {"count": count, "largest": examples}


def _example(corpus: Corpus, kept_copy: Ints, leader: int, size: int, workspace: Workspace) -> dict[str, Any]:
    """Describe a cluster by its kept document and the first of the others, each as unit and number in it."""
    others: list[int] = []
    for start, stop in corpus.ranges():
        members = start + np.flatnonzero(kept_copy[start:stop] == leader)
        others += [number for number in members.tolist() if number != leader]
        if len(others) >= _DOCUMENTS:
            break
    others = others[:_DOCUMENTS]
    equal = (corpus.take("hashes", np.array(others)) == corpus.take("hashes", np.array([leader]))).all(axis=1)
    similarity = np.ones(len(others))
    unequal = np.flatnonzero(~equal)
    similarity[unequal] = compare(corpus, np.array(others)[unequal], np.full(len(unequal), leader), workspace)
    return {
        "documents": size,
        "share": size / corpus.count,
        "kept": list(corpus.place(leader)),
        "removed": [
            {
                "document": list(corpus.place(number)),
                "similarity": round(float(estimate), 3),
                "equal": bool(is_equal),
            }
            for number, is_equal, estimate in zip(others, equal, similarity, strict=True)
        ],
    }


def whole_report(counts: dict[str, dict[str, int]], clusters: dict[str, Any], config: DedupConfig) -> dict[str, Any]:
    """Assemble the report as plain JSON: settings, totals, counts of each source, clusters."""
    total = empty_counts()
    for each in counts.values():
        for key, value in each.items():
            total[key] += value
    settings = config.model_dump(mode="json")
    if config.near:
        settings["found_at_similarity"] = round(collision_probability(config.similarity, config.bands, config.rows), 4)
    return {"settings": settings, "total": total, "sources": counts, "clusters": clusters}


@dataclass(frozen=True)
class Duplicates:
    """The documents and paragraphs to keep.

    Attributes:
        keep: For each unit bool (documents,): whether to keep the document.
        paragraph_keep: For each unit bool (paragraphs,), the paragraphs of all its documents in order, or None if all
            of them are kept. The paragraphs of removed documents are marked as kept.
        report: The findings as plain JSON; see docs/deduplication.md.
    """

    keep: list[Bools]
    paragraph_keep: list[Bools | None]
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
        paragraph_keep: list[Bools | None] = [None] * len(prints)
        emptied = workspace.table(corpus.count, np.bool_)
        if config.paragraphs:
            dropped = mark_equal_paragraphs(corpus, kept_copy, workspace, partial(tell, "equal paragraphs"))
            _drop_paragraphs(corpus, dropped, emptied, paragraph_keep, counts)
        keep: list[Bools] = [np.zeros(0, dtype=bool)] * len(prints)
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


def _count(corpus: Corpus, kept_copy: Ints, counts: dict[str, dict[str, int]], kind: str) -> None:
    """Add the documents that the latest stage removed to the counts of a kind of duplicates."""
    for _, source, start, prints in corpus.units():
        gone = int((kept_copy[start : start + len(prints)] != np.arange(start, start + len(prints))).sum())
        counts[corpus.names[source]][kind] += gone
    if kind == "near":
        for each in counts.values():
            each["near"] -= each["exact"]


def _drop_paragraphs(
    corpus: Corpus,
    dropped: Bools,
    emptied: Bools,
    paragraph_keep: list[Bools | None],
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


def _count_unit(counts: dict[str, int], keep: Bools, prints: Prints) -> None:
    sizes = np.asarray(prints.sizes)
    counts["documents"] += len(keep)
    counts["bytes"] += int(sizes.sum())
    counts["removed"] += len(keep) - int(keep.sum())
    counts["removed_bytes"] += int(sizes[~keep].sum())

"""Nearly equal documents: candidates from bands, checked by their signatures, gathered into clusters.

Documents that share a band's key are not compared pairwise but with a leader, the one of them that would be kept: those
similar to it are joined to it, the others choose a leader among themselves, and so on. What is joined is one component;
within a component documents are then compared with the kept ones alone. So every document that goes was found similar
to one that stays, and chains of similar documents, whose ends have nothing in common, do not fall together.

All choices go by content (`Corpus.rank`), none by position or time, so the outcome is the same for any order of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headway.config.data import DedupConfig
from headway.core.console import warning
from headway.data.dedup.corpus import Corpus
from headway.data.dedup.minhash import estimate_similarity
from headway.data.dedup.workspace import Rows, Workspace, group_starts, make_rows, thinned
from headway.data.feeding.order import mix

# Leaders that a document is compared with for one band. Further ones would be unlike it, and it has other bands.
_BAND_ROUNDS = 8
# Kept documents of one component that a document is compared with; one that is unlike all of them is kept. The time is
# by their number times that of the members, so there is an end to it.
_FINAL_ROUNDS = 1000

Judge = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]


def mark_similar_documents(
    corpus: Corpus,
    kept_copy: NDArray[np.int64],
    config: DedupConfig,
    workspace: Workspace,
    progress: Callable[[int], None],
) -> None:
    """Find near-duplicates among documents that are kept so far; warn of those that were not compared with all of their
    component.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), the number of the document kept instead of each, its own where it stays. Those
            of near-duplicates are set.
        config: Similarity and bands.
        workspace: Bounds the memory.
        progress: Called with the number of bands done.
    """
    parents = workspace.table(corpus.count, np.int64)
    # The leader that a document was last found similar to, plus 1: most meet again in the next band. Leaders met
    # themselves; 0 is for documents that are like no other.
    met = workspace.table(corpus.count, np.int64)
    for start, stop in corpus.ranges():
        parents[start:stop] = np.arange(start, stop)

    def similar(members: NDArray[np.int64], leaders: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = met[members] == leaders + 1
        unknown = np.flatnonzero(~found)
        found[unknown] = compare(corpus, members[unknown], leaders[unknown], workspace) >= config.similarity
        return found

    def join_similar(members: NDArray[np.int64], leaders: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = similar(members, leaders)
        lone = leaders[found][met[leaders[found]] == 0]
        met[lone] = lone + 1
        met[members[found]] = leaders[found] + 1
        join(parents, members[found], leaders[found])
        return found

    def drop_similar(members: NDArray[np.int64], leaders: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = similar(members, leaders)
        kept_copy[members[found]] = leaders[found]
        return found

    for band in range(config.bands):
        with workspace.partition(partial(_band_rows, corpus, kept_copy, band), corpus.count) as partition:
            for part in range(partition.parts):
                _follow_leaders(corpus, partial(partition.read, part), join_similar, _BAND_ROUNDS, workspace)
        progress(band + 1)
    with workspace.partition(partial(_component_rows, corpus, parents, met), corpus.count) as partition:
        reads = (partial(partition.read, part) for part in range(partition.parts))
        left = sum(_follow_leaders(corpus, read, drop_similar, _FINAL_ROUNDS, workspace, True) for read in reads)
    if left:
        warning(
            f"{left:,} documents stay that were not compared with all others of their group: of so many similar ones"
            f" more than {_FINAL_ROUNDS:,} stay, as of one template with several blanks"
        )


def _band_rows(corpus: Corpus, kept_copy: NDArray[np.int64], band: int) -> Iterator[Rows]:
    """Keys of a band and numbers, of kept documents with words."""
    for start, keys in corpus.band(band):
        numbers = np.arange(start, start + len(keys))
        inside = np.flatnonzero((keys != 0) & (kept_copy[start : start + len(keys)] == numbers))
        yield make_rows(keys[inside], numbers[inside])


def _component_rows(corpus: Corpus, parents: NDArray[np.int64], met: NDArray[np.int64]) -> Iterator[Rows]:
    """Components, as keys, and numbers of documents that are like another."""
    for start, stop in corpus.ranges():
        numbers = start + np.flatnonzero(met[start:stop])
        yield make_rows(mix(find(parents, numbers).astype(np.uint64)), numbers)


def _follow_leaders(
    corpus: Corpus,
    read: Callable[[], Iterator[Rows]],
    judge: Judge,
    rounds: int,
    workspace: Workspace,
    counts: bool = False,
) -> int:
    """Show members of each group of equal keys to the group's leader; those turned away form a group of their own.

    Args:
        corpus: The documents.
        read: Goes through keys and numbers of all documents, the same each time.
        judge: From members and their leaders, which ones belong together; takes note of it.
        rounds: Leaders that a group may have, one after the other.
        workspace: Bounds the memory.
        counts: Count what is left.

    Returns:
        If so, documents of groups that would have had more leaders.
    """
    spool, left = None, 0
    for number in range(rounds + counts):
        leader_keys, leaders = _find_leaders(corpus, read, workspace)
        if not len(leaders):
            break
        if number == rounds:
            left = sum(int(np.isin(rows[:, 0], leader_keys).sum()) for rows in read())
            break
        rest = workspace.spool()
        for rows in read():
            place = np.minimum(np.searchsorted(leader_keys, rows[:, 0]), len(leader_keys) - 1)
            numbers = rows[:, 1].astype(np.int64)
            members = np.flatnonzero((leader_keys[place] == rows[:, 0]) & (leaders[place] != numbers))
            if members.size:
                rest.add(rows[members[~judge(numbers[members], leaders[place[members]])]])
        if spool is not None:
            spool.close()
        spool, read = rest, rest.read
    if spool is not None:
        spool.close()
    return left


def _find_leaders(
    corpus: Corpus, read: Callable[[], Iterator[Rows]], workspace: Workspace
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Of each key that several documents have: the key, ascending, and the document that goes before all others."""

    def blocks() -> Iterator[Rows]:
        for rows in read():
            yield make_rows(rows[:, 0], rows[:, 1], np.zeros(len(rows)))

    rows = thinned(blocks(), workspace.rows, partial(_best_of_each, corpus), width=3)
    several = rows[:, 2] != 0
    return rows[several, 0].copy(), rows[several, 1].astype(np.int64)


def _best_of_each(corpus: Corpus, rows: Rows) -> Rows:
    """One row for each key, ascending; the third number says whether there are or were more."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    starts = group_starts(rows[:, 0])
    if starts.all():
        return rows
    groups = np.cumsum(starts) - 1
    shared = np.flatnonzero(np.bincount(groups)[groups] > 1)
    numbers = rows[shared, 1].astype(np.int64)
    rows[shared, 1] = numbers[np.lexsort((*corpus.rank(numbers), groups[shared]))].astype(np.uint64)
    rows[shared, 2] = 1
    return rows[starts]


def compare(
    corpus: Corpus, left: NDArray[np.int64], right: NDArray[np.int64], workspace: Workspace
) -> NDArray[np.float64]:
    """Estimated similarity of pairs of documents, float64 (n,), some pairs at a time."""
    similarity = np.zeros(len(left))
    if not len(left):
        return similarity
    width = 4 * corpus.take("signatures", left[:1]).shape[1]
    # Two signatures, and about six arrays of their width on the way to the estimate.
    step = max(16, min(1 << 14, workspace.memory_bytes // 4 // (8 * width)))
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        similarity[part] = estimate_similarity(
            corpus.take("signatures", left[part]), corpus.take("signatures", right[part])
        )
    return similarity


def find(parents: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Roots of documents; their paths are shortened on the way."""
    roots = parents[numbers]
    while True:
        above = parents[roots]
        if np.array_equal(above, roots):
            break
        roots = above
    parents[numbers] = roots
    return roots


def join(parents: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]) -> None:
    """Make one set of each pair's sets; a set's root is its lowest number."""
    while len(left):
        left, right = find(parents, left), find(parents, right)
        apart = left != right
        left, right = left[apart], right[apart]
        # Where several want to hang the same root, the lowest wins and the others come again.
        np.minimum.at(parents, np.maximum(left, right), np.minimum(left, right))

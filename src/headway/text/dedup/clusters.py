"""Near-duplicate documents: candidates from bands, checked by their signatures and gathered into clusters.

Documents with the same band key are not compared pairwise but with a leader, the one that would be kept. Similar ones
join the leader; the others choose a leader among themselves, and so on. Joined documents form a component. Within a
component, documents are then compared only with the kept ones. So every removed document was found similar to a kept
one, and a chain of similar documents, whose ends have nothing in common, does not collapse into one cluster.

All choices depend on content (`Corpus.rank`), not on position or time, so the order of files does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from headway.config.sections.data import DedupConfig
from headway.core.arrays import Bools, Floats, Ints, UInt64s
from headway.core.console import warning
from headway.data.feeding.order import mix
from headway.text.dedup.corpus import Corpus
from headway.text.dedup.minhash import estimate_similarity
from headway.text.dedup.workspace import Rows, Workspace, group_starts, make_rows, thinned

# Leaders compared with a document per band. Further leaders are rarely similar, and the document has other bands.
_BAND_ROUNDS = 8
# Kept documents of a component compared with a document; a document that is similar to none of them is kept. The time
# grows with their number times that of the members, hence the limit.
_FINAL_ROUNDS = 1000

Judge = Callable[[Ints, Ints], Bools]


def mark_similar_documents(
    corpus: Corpus,
    kept_copy: Ints,
    config: DedupConfig,
    workspace: Workspace,
    progress: Callable[[int], None],
) -> None:
    """Find near-duplicates among the documents kept so far.

    A warning reports documents that were not compared with all kept documents of their component.

    Args:
        corpus: The documents.
        kept_copy: int64 (documents,), the number of the document kept in place of each document, its own number if it
            is kept. The entries of near-duplicates are changed.
        config: Similarity and bands.
        workspace: Limits the memory.
        progress: Called with the number of bands done.
    """
    parents = workspace.table(corpus.count, np.int64)
    # The leader that a document was last found similar to, plus 1, as a cache: most pairs meet again in the next band.
    # Leaders refer to themselves; 0 marks documents that are similar to no other.
    met = workspace.table(corpus.count, np.int64)
    for start, stop in corpus.ranges():
        parents[start:stop] = np.arange(start, stop)

    def similar(members: Ints, leaders: Ints) -> Bools:
        found: Bools = met[members] == leaders + 1
        unknown = np.flatnonzero(~found)
        found[unknown] = compare(corpus, members[unknown], leaders[unknown], workspace) >= config.similarity
        return found

    def join_similar(members: Ints, leaders: Ints) -> Bools:
        found = similar(members, leaders)
        lone = leaders[found][met[leaders[found]] == 0]
        met[lone] = lone + 1
        met[members[found]] = leaders[found] + 1
        join(parents, members[found], leaders[found])
        return found

    def drop_similar(members: Ints, leaders: Ints) -> Bools:
        found = similar(members, leaders)
        kept_copy[members[found]] = leaders[found]
        return found

    for band in range(config.bands):
        with workspace.partition(partial(_band_rows, corpus, kept_copy, band), corpus.count) as partition:
            for part in range(partition.parts):
                _follow_leaders(
                    corpus, partial(partition.read, part), join_similar, rounds=_BAND_ROUNDS, workspace=workspace
                )
        progress(band + 1)
    with workspace.partition(partial(_component_rows, corpus, parents, met), corpus.count) as partition:
        reads = (partial(partition.read, part) for part in range(partition.parts))
        left = sum(
            _follow_leaders(corpus, read, drop_similar, rounds=_FINAL_ROUNDS, workspace=workspace, counts=True)
            for read in reads
        )
    if left:
        warning(
            f"{left:,} documents are kept without a comparison with all others of their group: it has more than"
            f" {_FINAL_ROUNDS:,} distinct documents, as from one template with several blanks"
        )


def _band_rows(corpus: Corpus, kept_copy: Ints, band: int) -> Iterator[Rows]:
    """Yield the keys of a band with the numbers of the documents, for kept documents with words."""
    for start, keys in corpus.blocks(lambda prints: prints.bands[band]):
        numbers = np.arange(start, start + len(keys))
        inside = np.flatnonzero((keys != 0) & (kept_copy[start : start + len(keys)] == numbers))
        yield make_rows(keys[inside], numbers[inside])


def _component_rows(corpus: Corpus, parents: Ints, met: Ints) -> Iterator[Rows]:
    """Yield components, as keys, with the numbers of documents that are similar to another."""
    for start, stop in corpus.ranges():
        numbers = start + np.flatnonzero(met[start:stop])
        yield make_rows(mix(find(parents, numbers).astype(np.uint64)), numbers)


def _follow_leaders(
    corpus: Corpus,
    read: Callable[[], Iterator[Rows]],
    judge: Judge,
    *,
    rounds: int,
    workspace: Workspace,
    counts: bool = False,
) -> int:
    """Compare the members of each group of equal keys with the group's leader; rejected ones form a new group.

    Args:
        corpus: The documents.
        read: Iterates over keys and numbers of all documents, in the same order each time.
        judge: Decides which members belong to their leaders, and records it.
        rounds: Number of successive leaders of a group.
        workspace: Limits the memory.
        counts: Whether to count the remaining documents.

    Returns:
        With `counts`, the number of documents in groups that would need more leaders; else 0.
    """
    spool = None
    left = 0
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
        spool = rest
        read = rest.read
    if spool is not None:
        spool.close()
    return left


def _find_leaders(corpus: Corpus, read: Callable[[], Iterator[Rows]], workspace: Workspace) -> tuple[UInt64s, Ints]:
    """Return the keys that several documents share, ascending, and the best-ranked document of each key."""

    def blocks() -> Iterator[Rows]:
        for rows in read():
            yield make_rows(rows[:, 0], rows[:, 1], np.zeros(len(rows)))

    rows = thinned(blocks(), workspace.rows, partial(_best_of_each, corpus), width=3)
    several = rows[:, 2] != 0
    return rows[several, 0].copy(), rows[several, 1].astype(np.int64)


def _best_of_each(corpus: Corpus, rows: Rows) -> Rows:
    """Return one row per key, ascending; the third number says whether the key occurred more than once."""
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


def compare(corpus: Corpus, left: Ints, right: Ints, workspace: Workspace) -> Floats:
    """Estimate the similarity of pairs of documents, float64 (n,), in blocks of pairs."""
    similarity = np.zeros(len(left))
    if not len(left):
        return similarity
    width = 4 * corpus.take("signatures", left[:1]).shape[1]
    # A pair needs two signatures, and about six temporary arrays of their width.
    step = max(16, min(1 << 14, workspace.memory_bytes // 4 // (8 * width)))
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        similarity[part] = estimate_similarity(
            corpus.take("signatures", left[part]), corpus.take("signatures", right[part])
        )
    return similarity


def find(parents: Ints, numbers: Ints) -> Ints:
    """Return the roots of documents, with path compression."""
    roots = parents[numbers]
    while True:
        above = parents[roots]
        if np.array_equal(above, roots):
            break
        roots = above
    parents[numbers] = roots
    return roots


def join(parents: Ints, left: Ints, right: Ints) -> None:
    """Join the sets of each pair; the root of a set is its lowest number."""
    while len(left):
        left = find(parents, left)
        right = find(parents, right)
        apart = left != right
        left = left[apart]
        right = right[apart]
        # If several pairs set the parent of one root, the lowest wins, and the others are repeated.
        np.minimum.at(parents, np.maximum(left, right), np.minimum(left, right))

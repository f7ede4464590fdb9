"""The report of deduplication: numbers and examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DedupConfig
from headway.text.dedup.clusters import compare
from headway.text.dedup.corpus import Corpus
from headway.text.dedup.minhash import collision_probability
from headway.text.dedup.workspace import Workspace

# Largest clusters shown as examples, and removed documents shown of each.
_CLUSTERS = 5
_DOCUMENTS = 5


def empty_counts() -> dict[str, int]:
    """Return zero counts for a source."""
    names = ("documents", "bytes", "exact", "near", "emptied", "removed", "removed_bytes")
    return dict.fromkeys((*names, "paragraphs", "paragraphs_removed"), 0)


def count_clusters(corpus: Corpus, kept_copy: NDArray[np.int64], workspace: Workspace) -> dict[str, Any]:
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


def _example(
    corpus: Corpus, kept_copy: NDArray[np.int64], leader: int, size: int, workspace: Workspace
) -> dict[str, Any]:
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

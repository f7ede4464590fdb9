"""Real prose, edits of it, and the true similarity of two texts, worked out by sets of words in plain Python."""

from __future__ import annotations

import random
import re
import tracemalloc
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from headway.config.sections.data import DedupConfig
from headway.text.dedup import DocumentPrints, StoredPrints, find_duplicates, fingerprint_documents
from headway.text.dedup.minhash import Layout

#: Limits that let everything pass.
NO_LIMITS = {"max_cluster": 1.0, "max_removed": 1.0, "max_removed_per_source": 1.0}


@cache
def prose(words: int, count: int) -> list[str]:
    """Consecutive pieces of the Python language reference, of so many words each."""
    from pydoc_data.topics import topics

    stream = " ".join(text for _, text in sorted(topics.items())).split()
    pieces = [" ".join(stream[start : start + words]) for start in range(0, len(stream) - words, words)]
    assert len(pieces) >= count
    return pieces[:count]


def edited(text: str, edits: int, seed: int) -> str:
    """The text with so many words replaced."""
    draw = random.Random(seed)
    words = text.split(" ")
    for place in draw.sample(range(len(words)), edits):
        words[place] = f"edit{draw.randrange(10**9)}"
    return " ".join(words)


def shingles(text: str, ngram: int = 5) -> set[tuple[str, ...]]:
    """The n-grams of words of a text without scripts that have no spaces."""
    text = unicodedata.normalize("NFC", text)
    kept = (c if unicodedata.category(c)[0] in "LNM" else " " for c in text)
    words = re.split(" +", "".join(kept).lower().strip(" "))
    if words == [""]:
        return set()
    return {tuple(words[i : i + ngram]) for i in range(max(1, len(words) - ngram + 1))}


def similarity(left: str, right: str, ngram: int = 5) -> float:
    """Jaccard similarity of two texts' n-grams."""
    a, b = shingles(left, ngram), shingles(right, ngram)
    return len(a & b) / len(a | b)


def settings(**values: object) -> DedupConfig:
    """A config without limits, unless they are given."""
    return DedupConfig.model_validate({**NO_LIMITS, **values})


def fingerprint_units(texts: Sequence[str], config: DedupConfig, size: int) -> list[DocumentPrints]:
    """Prints of texts cut into units of so many."""
    return [fingerprint_documents(texts[start : start + size], config) for start in range(0, len(texts), size)]


def random_prints(hashes: np.ndarray[tuple[int], np.dtype[np.uint64]], config: DedupConfig) -> DocumentPrints:
    """Prints with given first halves of hashes and nothing else that matters."""
    count, layout = len(hashes), Layout.of(config)
    return DocumentPrints(
        hashes=np.stack([hashes, hashes], axis=1),
        sizes=np.ones(count, np.int64),
        signatures=np.zeros((count, layout.columns if config.near else 0), np.uint32),
        bands=np.zeros((layout.bands if config.near else 0, count), np.uint64),
        paragraph_hashes=np.zeros(0, np.uint64),
        paragraph_counts=np.zeros(count, np.int64),
    )


def dedup_peak(distinct: int, bound: int, folder: Path) -> int:
    """Peak of memory in bytes, while exact copies are found among 400,000 documents with so many different texts."""
    draw = np.random.default_rng(0)
    count, config = 400_000, settings(documents=True)
    hashes = draw.integers(0, 2**64, distinct, dtype=np.uint64)[draw.integers(0, distinct, count)]
    files = []
    for number, part in enumerate(np.array_split(hashes, 8)):
        random_prints(part, config).save(folder / f"{number}.prints")
        files.append(StoredPrints(folder / f"{number}.prints"))
    for _ in range(2):  # the first time counts what the interpreter itself takes for modules that are loaded meanwhile
        tracemalloc.start()
        found = find_duplicates(files, ["source"] * 8, config, memory_bytes=bound, scratch=folder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.report["total"]["exact"] == count - len(np.unique(hashes))
    return peak

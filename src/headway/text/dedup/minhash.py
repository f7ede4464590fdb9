"""MinHash: an estimate of the similarity of two documents from a few hundred bytes about each.

A document is the set of its shingles (n-grams of words). The similarity of two documents is the Jaccard index of their
sets. The minima of a random hash function over both sets are equal with exactly this probability (Broder 1997). One
hash replaces the many functions needed: it distributes shingles over bins, and each bin has its own minimum (one
permutation hashing; Li, Owen & Zhang 2012). Two things are kept from the minima of the bins:

- the signature, four bits of each bin's minimum, for the estimate of similarity (b-bit minwise hashing; Li & Koenig
  2010, section 2; bins that are empty in both do not count: Li, Owen & Zhang 2012, section 3);
- a key for each band. A row is a group of bins; a band's key combines the minima of its rows. Documents with an equal
  band key are candidates (Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, section 3.4). A row whose bins are
  all empty borrows from the first filled row in an order of its own (optimal densification; Shrivastava 2017, section
  4). So a row agrees with a probability equal to the similarity, whatever the length of the documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DedupConfig
from headway.core.arrays import Floats, Ints, UInt64s
from headway.data.feeding.order import mix

# Minimum number of bins: the standard error of an estimate is below 0.013 at similarity 0.8.
_BINS = 1024
_EMPTY = np.uint32(0xFFFFFFFF)
_LOW_32 = np.uint64(0xFFFFFFFF)
# A bin's minimum has a code from 1 to 15; 0 marks an empty bin.
_CODES = 15
_SHINGLE_FACTOR = np.uint64(0xD1342543DE82EF95)
_BAND_FACTOR = np.uint64(0xAF251AF3B0F025B5)
# Words turned into shingles at a time, and empty rows filled at a time.
_WORDS = 1 << 16
_ROWS = 1 << 13


@dataclass(frozen=True)
class Layout:
    """Layout of bins, rows and bands: bin `i` belongs to row `i % rows`, row `j` to band `j // rows_per_band`."""

    ngram: int
    bands: int
    rows_per_band: int

    @classmethod
    def of(cls, config: DedupConfig) -> Layout:
        """Return the layout for a config."""
        return cls(config.ngram, config.bands, config.rows)

    @property
    def rows(self) -> int:
        """Number of rows of all bands."""
        return self.bands * self.rows_per_band

    @property
    def bins(self) -> int:
        """Number of bins, a multiple of the rows."""
        return self.rows * -(-_BINS // self.rows)

    @property
    def columns(self) -> int:
        """Width of a signature in uint32: four bits per bin, rounded up to 64 bits."""
        return 2 * -(-self.bins // 16)


def collision_probability(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that documents of a similarity agree in a band: 1 - (1 - s^rows)^bands, an S-curve in s.

    Source: Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, section 3.4.2.
    """
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def make_signatures(words: UInt64s, counts: Ints, layout: Layout) -> tuple[NDArray[np.uint32], UInt64s]:
    """Compute the signatures and band keys of documents.

    Args:
        words: Hashes of all documents' words, uint64 (words,).
        counts: Words of each document, int64 (n,).
        layout: Bins, rows and bands.

    Returns:
        Signatures, uint32 (n, `layout.columns`), and band keys, uint64 (bands, n). Documents without words have zeros
        in both; no other document has a key of 0.
    """
    minima = _bin_minima(words, counts, layout)
    keys = _band_keys(minima, layout)
    keys[:, counts == 0] = 0
    return _pack(minima, layout), keys


def _bin_minima(words: UInt64s, counts: Ints, layout: Layout) -> NDArray[np.uint32]:
    """Return the smallest hash in each bin: uint32 (n, bins), with all bits set for an empty bin."""
    minima = np.full((len(counts), layout.bins), _EMPTY, dtype=np.uint32)
    flat = minima.reshape(-1)
    ends = np.cumsum(counts)
    windows = len(words) - layout.ngram + 1
    for start in range(0, windows, _WORDS):
        stop = min(start + _WORDS, windows)
        # Horner's rule over the n-gram: order matters, as it does in a text.
        shingles = words[start:stop].copy()
        for shift in range(1, layout.ngram):
            shingles = shingles * _SHINGLE_FACTOR + words[start + shift : stop + shift]
        documents = np.searchsorted(ends, np.arange(start, stop), side="right")
        whole = np.arange(start + layout.ngram, stop + layout.ngram) <= ends[documents]
        _update_minima(flat, documents[whole], shingles[whole], layout)
    short = np.flatnonzero((counts > 0) & (counts < layout.ngram))
    if short.size:
        shingles = _short_shingles(words, (ends - counts)[short], counts[short], layout.ngram)
        _update_minima(flat, short, shingles, layout)
    return minima


def _short_shingles(words: UInt64s, starts: Ints, counts: Ints, ngram: int) -> UInt64s:
    """Return the only shingle of each document with fewer words than a shingle: all its words, padded with zeros."""
    shingles = np.zeros(len(starts), dtype=np.uint64)
    for shift in range(ngram):
        there = np.where(shift < counts, starts + shift, 0)
        shingles = shingles * _SHINGLE_FACTOR + np.where(shift < counts, words[there], np.uint64(0))
    return shingles


def _update_minima(flat: NDArray[np.uint32], documents: Ints, shingles: UInt64s, layout: Layout) -> None:
    """Update the minima of bins: the upper half of a shingle's hash selects the bin, the lower half is the value."""
    hashes = mix(shingles)
    bins = ((hashes >> np.uint64(32)) * np.uint64(layout.bins)) >> np.uint64(32)
    values = np.minimum((hashes & _LOW_32).astype(np.uint32), _EMPTY - np.uint32(1))
    np.minimum.at(flat, documents * layout.bins + bins.astype(np.int64), values)


def _pack(minima: NDArray[np.uint32], layout: Layout) -> NDArray[np.uint32]:
    """Pack four bits of each bin, the first half of the bins in the low halves of bytes: uint32 (n, columns)."""
    codes = (((minima & np.uint32(0xFFFF)) * np.uint32(_CODES)) >> np.uint32(16)) + np.uint32(1)
    codes = np.where(minima == _EMPTY, np.uint32(0), codes).astype(np.uint8)
    half = -(-layout.bins // 2)
    packed = np.zeros((len(minima), 4 * layout.columns), dtype=np.uint8)
    packed[:, :half] = codes[:, :half]
    packed[:, : layout.bins - half] |= codes[:, half:] << np.uint8(4)
    return packed.view("<u4").astype(np.uint32, copy=False)


def _band_keys(minima: NDArray[np.uint32], layout: Layout) -> UInt64s:
    """Return a key for each band: uint64 (bands, n)."""
    count = len(minima)
    rows = minima.reshape(count, layout.bins // layout.rows, layout.rows).min(axis=1)
    # Add the number of the row to its value, so that values borrowed from different rows differ.
    values = rows.astype(np.uint64) | (np.arange(layout.rows, dtype=np.uint64) << np.uint64(32))
    filled = rows != _EMPTY
    order = _borrowing_order(layout.rows)
    last = np.iinfo(order.dtype).max
    documents, empty = np.nonzero(~filled & filled.any(axis=1, keepdims=True))
    for start in range(0, len(documents), _ROWS):
        these = documents[start : start + _ROWS]
        lacking = empty[start : start + _ROWS]
        lender = np.where(filled[these], order[lacking], last).argmin(axis=1)
        values[these, lacking] = values[these, lender]
    keys = np.zeros((layout.bands, count), dtype=np.uint64)
    for row in range(layout.rows_per_band):
        keys = keys * _BAND_FACTOR + values.T[row :: layout.rows_per_band]
    return np.maximum(mix(keys), np.uint64(1))


@cache
def _borrowing_order(rows: int) -> NDArray[np.unsignedinteger[Any]]:
    """Return ranks (rows, rows): entry [i, j] is the rank of row j in the order in which an empty row i borrows."""
    order = np.empty((rows, rows), dtype=np.uint8 if rows < 256 else np.uint16)
    for row in range(rows):  # to sort all rows at once would take sixteen times the memory
        first = row * rows + 1
        numbers = mix(np.arange(first, first + rows, dtype=np.uint64) * _BAND_FACTOR)
        order[row] = np.argsort(np.argsort(numbers))
    return order


def estimate_similarity(left: NDArray[np.uint32], right: NDArray[np.uint32]) -> Floats:
    """Estimate the Jaccard similarity of pairs of documents: float64 (n,), 0 if either has no words.

    The estimate is unbiased. Its standard error is at most sqrt(p (1 - p) / bins) * 15 / 14, p = s + (1 - s) / 15, for
    long documents, and smaller for documents with fewer shingles than bins, which the bins describe almost completely.

    Args:
        left: Signatures, uint32 (n, columns).
        right: Signatures of the others, uint32 (n, columns).
    """
    a, b = (np.ascontiguousarray(side).view(np.uint64) for side in (left, right))
    ones = np.uint64(0x1111111111111111)
    a_filled = _any_bit(a) & ones
    b_filled = _any_bit(b) & ones
    both = a_filled & b_filled
    equal = both & ~_any_bit(a ^ b)
    both_count = _ones(both)
    either_count = _ones(a_filled | b_filled)
    equal_count = _ones(equal)
    # One in 15 bins with different minima has the same code by chance.
    same = (equal_count - both_count / _CODES) * (_CODES / (_CODES - 1))
    similarity: Floats = np.clip(same / np.maximum(either_count, 1.0), 0.0, 1.0)
    return similarity


def _any_bit(values: UInt64s) -> UInt64s:
    """Return in the lowest bit of each group of four whether any bit is set; the other bits are undefined."""
    values = values | (values >> np.uint64(2))
    return values | (values >> np.uint64(1))


def _ones(values: UInt64s) -> Floats:
    """Count per row the groups of four whose lowest bit is set: float64 (n,)."""
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    pairs = (values & low) + ((values >> np.uint64(4)) & low)
    # The top byte of the product is the sum of all bytes.
    counts: Floats = ((pairs * np.uint64(0x0101010101010101)) >> np.uint64(56)).sum(axis=1, dtype=np.float64)
    return counts

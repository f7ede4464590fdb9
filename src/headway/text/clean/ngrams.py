"""64-bit hashes of word n-grams, computed for a whole document at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Odd, so that multiplication modulo 2^64 is a bijection; the bits are those of the golden ratio, as in SplitMix64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: Hashes) -> Hashes:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014), a bijection that scatters neighbouring values."""
    values = (values + np.uint64(1)) * _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def longer(grams: Hashes, words: Hashes, length: int) -> Hashes:
    """Extend hashes of n-grams by one word. A hash is a polynomial over the hashes of the words.

    Args:
        grams: Hashes of all n-grams of `length - 1` words; for `length` 2, the words' hashes.
        words: Hashes of the document's words, (n,).
        length: Words in an extended n-gram, at least 2.

    Returns:
        Hashes of all n-grams of `length` words, (n - length + 1,); empty if the document has fewer words.
    """
    if len(words) < length:
        return words[:0]
    return grams[: len(words) - length + 1] * _FACTOR + words[length - 1 :]

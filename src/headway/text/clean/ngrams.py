"""64-bit hashes of word n-grams, computed for a whole document at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.data.feeding.order import mix

Hashes = NDArray[np.uint64]

# Odd, so that multiplication modulo 2^64 is a bijection; the bits are those of the golden ratio, as in SplitMix64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: Hashes) -> Hashes:
    """Scatter neighbouring values by a bijection: the numbers of SplitMix64 (Steele et al. 2014) at these places."""
    return mix((values + np.uint64(1)) * _FACTOR)


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

"""64-bit hashes of word n-grams, on whole documents at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Odd, so that multiplication modulo 2^64 loses nothing; the bits are those of the golden ratio, as in SplitMix64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: Hashes) -> Hashes:
    """SplitMix64's finalizer (Steele et al. 2014): a bijection under which neighbours look random."""
    values = (values + np.uint64(1)) * _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def longer(grams: Hashes, words: Hashes, length: int) -> Hashes:
    """Hashes of the n-grams of `length` words from those one word shorter: a polynomial over the words' hashes.

    Args:
        grams: Hashes of all n-grams of `length - 1` words; for `length` 2 the words' own.
        words: Hashes of the document's words, (n,).
        length: Words in an n-gram, from 2.

    Returns:
        (n - length + 1,), empty when the document has fewer words.
    """
    if len(words) < length:
        return words[:0]
    return grams[: len(words) - length + 1] * _FACTOR + words[length - 1 :]

"""Words of a text as 64-bit hashes; texts that differ only in case, punctuation and spacing have the same words.

A word is a run of letters, digits and combining marks, in Unicode normal form C and lower case. All other characters
separate words. In scripts without spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) every character
is a word. NumPy processes whole blocks of text, never word by word.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headway.data.feeding.order import mix
from headway.data.scripts import IDEOGRAPHS, UNSPACED

#: Version of Python's Unicode tables, which define letters and their lower case.
UNICODE_VERSION = unicodedata.unidata_version

# Code points below this are in tables; above it are ideographs (planes 2 and 3) and characters that are not words.
_TABLE = 0x20000
_SPACE = 32
# Bytes of normalised text hashed at a time: the arrays of a block stay in the processor's cache.
_BLOCK = 1 << 19
# Longer words (data in base 64, minified code) are hashed one by one.
_LONGEST = 64
_LENGTH_SALT = np.uint64(0x9E3779B97F4A7C15)
# Masks that leave the first 0 to 8 bytes of a little-endian 64-bit number.
_FIRST_BYTES = np.array([(1 << (8 * count)) - 1 for count in range(9)], dtype=np.uint64)


def normal_bytes(text: str, encoded: bytes) -> bytes:
    """Return the normalized words of a text as UTF-8, separated (and possibly surrounded) by spaces.

    Args:
        text: The text.
        encoded: The text in UTF-8.
    """
    if text.isascii():
        return encoded.translate(_ascii_table())
    if not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    lower, alone = _unicode_tables()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    beyond = codes >= _TABLE
    if beyond.any():
        # The last two entries of the tables stand for an ideograph and for a character that is not a word.
        ideograph = beyond & (codes <= IDEOGRAPHS[1])
        looked_up = np.where(beyond, np.where(ideograph, _TABLE, _TABLE + 1), codes)
        normal = np.where(ideograph, codes, lower[looked_up])
        single = alone[looked_up]
    else:
        normal = lower[codes]
        single = alone[codes]
    if single.any():
        spaced = np.full(len(normal) + 2 * int(single.sum()), _SPACE, dtype="<u4")
        spaced[np.arange(len(normal)) + 2 * np.cumsum(single) - single] = normal
        normal = spaced
    words = normal.astype("<u4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")
    return words.encode("utf-8", "surrogatepass")


@cache
def _ascii_table() -> bytes:
    lower, _ = _unicode_tables()
    return bytes(int(lower[code]) if code < 128 else code for code in range(256))


@cache
def _unicode_tables() -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return for each code point its lower case (a space if not part of a word), and whether it is a word by itself."""
    lower = np.full(_TABLE + 2, _SPACE, dtype=np.uint32)
    alone = np.zeros(_TABLE + 2, dtype=bool)
    for code in range(_TABLE):
        character = chr(code)
        if unicodedata.category(character)[0] in "LNM":
            lower[code] = ord(character.lower()[0])
    for first, last in UNSPACED:
        alone[first : last + 1] = lower[first : last + 1] != _SPACE
    alone[_TABLE] = True
    return lower, alone


def hash_words(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hash every word of texts made by `normal_bytes`.

    Returns:
        The words' hashes, uint64 (words of all texts,), and the number of words of each text, int64 (texts,).
    """
    joined = b" ".join(texts) + b" "
    hashes: list[NDArray[np.uint64]] = []
    starts: list[NDArray[np.int64]] = []
    first = 0
    while first < len(joined):
        # A block ends with a space, so that no word is split.
        end = joined.find(b" ", min(first + _BLOCK, len(joined) - 1)) + 1
        block_hashes, block_starts = _hash_block(joined[first:end])
        hashes.append(block_hashes)
        starts.append(block_starts + first)
        first = end
    ends = np.cumsum(np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts)))
    before = np.searchsorted(np.concatenate(starts), ends) if starts else np.zeros(len(texts), np.int64)
    return np.concatenate(hashes), np.diff(before, prepend=0)


def _hash_block(block: bytes) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return hashes and starts of the words of a block of bytes that ends with a space."""
    inside = np.frombuffer(block, dtype=np.uint8) != _SPACE
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    starts = edges[0::2]
    lengths = edges[1::2] - edges[0::2]
    hashes = lengths.astype(np.uint64) * _LENGTH_SALT
    # A view with the eight bytes at every offset as one number.
    loads = np.ndarray((len(block),), dtype="<u8", buffer=block + bytes(8), strides=(1,))
    hashes = mix(hashes ^ (loads[starts] & _FIRST_BYTES[np.minimum(lengths, 8)]))
    for offset in range(8, _LONGEST, 8):
        longer = np.flatnonzero(lengths > offset)
        if not longer.size:
            break
        rest = _FIRST_BYTES[np.minimum(lengths[longer] - offset, 8)]
        hashes[longer] = mix(hashes[longer] ^ (loads[starts[longer] + offset] & rest))
    for number in np.flatnonzero(lengths > _LONGEST).tolist():
        word = block[starts[number] : starts[number] + lengths[number]]
        hashes[number] = int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")
    return hashes, starts

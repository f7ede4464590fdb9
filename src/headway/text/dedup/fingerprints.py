"""Prints of documents, the input of deduplication: hashes, sizes, MinHash signatures, hashes of paragraphs.

Prints take a few hundred bytes per document of any length. They depend only on the texts and the config, so any process
can make them for a unit of input, and they are cached.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DedupConfig
from headway.core.arrays import Bools, Ints, UInt64s
from headway.core.errors import DataError
from headway.core.files.atomic import atomic_write
from headway.core.files.foreign import open_regular
from headway.core.process.faults import fault_point
from headway.data.feeding.order import mix
from headway.data.scripts import IDEOGRAPHS, UNSPACED
from headway.text.dedup.minhash import Layout, make_signatures
from headway.text.dedup.paragraphs import hash_paragraphs

#: Version of the prints; increased whenever the same text would get different prints.
METHOD = 1
# Version of the division of texts into paragraphs.
_PARAGRAPHS = 2

_MAGIC = b"headway-prints-1"
# Documents and bytes of text processed at a time, so that their bins stay in the processor's cache.
_GROUP_DOCUMENTS = 256
_GROUP_BYTES = 1 << 20
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
def _unicode_tables() -> tuple[NDArray[np.uint32], Bools]:
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


def hash_words(texts: Sequence[bytes]) -> tuple[UInt64s, Ints]:
    """Hash every word of texts made by `normal_bytes`.

    Returns:
        The words' hashes, uint64 (words of all texts,), and the number of words of each text, int64 (texts,).
    """
    joined = b" ".join(texts) + b" "
    hashes: list[UInt64s] = []
    starts: list[Ints] = []
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


def _hash_block(block: bytes) -> tuple[UInt64s, Ints]:
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


@dataclass(frozen=True)
class DocumentPrints:
    """The prints of n documents with p paragraphs, in their order.

    Attributes:
        hashes: uint64 (n, 2), the first 128 bits of the SHA-256 of the text (UTF-8), big-endian.
        sizes: int64 (n,), bytes of the text in UTF-8.
        signatures: uint32 (n, columns), for the estimate of similarity; (n, 0) without `near`.
        bands: uint64 (bands, n), a key for each band, 0 for documents without words; (0, n) without `near`.
        paragraph_hashes: uint64 (p,), in order of the documents, 0 for a paragraph that is always kept; (0,) without
            `paragraphs`.
        paragraph_counts: int64 (n,), paragraphs of each document.
    """

    hashes: UInt64s
    sizes: Ints
    signatures: NDArray[np.uint32]
    bands: UInt64s
    paragraph_hashes: UInt64s
    paragraph_counts: Ints

    def __len__(self) -> int:
        return len(self.sizes)

    def save(self, path: Path) -> None:
        """Write all arrays to one file, atomically: a line with the format, then each array in NumPy's format."""
        with atomic_write(path) as file:
            file.write(_MAGIC + b"\n")
            for field in fields(DocumentPrints):
                np.lib.format.write_array(file, np.ascontiguousarray(getattr(self, field.name)), allow_pickle=False)
                fault_point("dedup.prints")


class StoredPrints:
    """The prints in a file that `DocumentPrints.save` wrote.

    Each access to an array maps the file; it does not stay open, since a corpus has more such files than a process may
    keep open.

    Raises:
        DataError: the file is missing or damaged, or has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = _read_places(path)

    def __len__(self) -> int:
        return int(self._places["sizes"][1][0])

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Map an array of `DocumentPrints`."""
        if name not in _DTYPES:
            raise AttributeError(name)
        offset, shape = self._places[name]
        if 0 in shape:
            return np.zeros(shape, dtype=_DTYPES[name])
        return np.memmap(self.path, dtype=_DTYPES[name], mode="r", offset=offset, shape=shape)


#: The input of `find_duplicates`.
Prints = DocumentPrints | StoredPrints

_DTYPES = {
    "hashes": "<u8",
    "sizes": "<i8",
    "signatures": "<u4",
    "bands": "<u8",
    "paragraph_hashes": "<u8",
    "paragraph_counts": "<i8",
}


def _read_places(path: Path) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """Read offset and shape of each array in a file of prints."""
    places: dict[str, tuple[int, tuple[Any, ...]]] = {}
    try:
        with open_regular(path) as file:
            if file.readline(100) != _MAGIC + b"\n":
                raise ValueError("the file has another format")
            for name, kind in _DTYPES.items():
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError("an array has another version")
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                if fortran or dtype != np.dtype(kind):
                    raise ValueError(f"{name} has another type")
                places[name] = (file.tell(), shape)
                file.seek(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
            if file.tell() != path.stat().st_size:
                raise ValueError("its length does not match its arrays")
    except (OSError, ValueError) as error:
        raise DataError(
            f"stored prints of documents cannot be read: {error}", where=str(path), fix="delete the file and try again"
        ) from None
    return places


def prints_recipe(config: DedupConfig) -> dict[str, Any]:
    """Return everything that a document's prints depend on besides its text, as plain JSON, for cache keys."""
    recipe: dict[str, Any] = {"method": METHOD}
    if config.near:
        near = {"ngram": config.ngram, "bands": config.bands, "rows": config.rows}
        recipe["near"] = {**near, "unicode": UNICODE_VERSION}
    if config.paragraphs:
        recipe["paragraph_bytes"] = config.paragraph_bytes
        recipe["paragraphs"] = _PARAGRAPHS
    return recipe


def fingerprint_documents(texts: Sequence[str], config: DedupConfig) -> DocumentPrints:
    """Make the prints of documents.

    Args:
        texts: The documents.
        config: Adds signatures with `near`, and hashes of paragraphs with `paragraphs`.

    Returns:
        Prints in the order of the texts. Each depends only on its text and the config.
    """
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    digests = b"".join([hashlib.sha256(data).digest()[:16] for data in encoded])
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    paragraph_hashes, paragraph_counts = _paragraphs(texts, config)
    signatures, bands = _near(texts, encoded, sizes, config)
    return DocumentPrints(
        hashes=np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2),
        sizes=sizes,
        signatures=signatures,
        bands=bands,
        paragraph_hashes=paragraph_hashes,
        paragraph_counts=paragraph_counts,
    )


def join_prints(parts: Sequence[DocumentPrints], config: DedupConfig) -> DocumentPrints:
    """Concatenate the prints of several batches of documents; without batches, return prints of no documents."""
    if len(parts) == 1:
        return parts[0]
    parts = parts or [fingerprint_documents([], config)]
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=int(field.name == "bands"))
        for field in fields(DocumentPrints)
    }
    return DocumentPrints(**joined)


def _paragraphs(texts: Sequence[str], config: DedupConfig) -> tuple[UInt64s, Ints]:
    if not config.paragraphs:
        return np.zeros(0, dtype=np.uint64), np.zeros(len(texts), dtype=np.int64)
    hashes = [hash_paragraphs(text, config.paragraph_bytes) for text in texts]
    counts = np.fromiter(map(len, hashes), np.int64, len(texts))
    return np.fromiter((value for each in hashes for value in each), np.uint64, int(counts.sum())), counts


def _near(
    texts: Sequence[str], encoded: Sequence[bytes], sizes: Ints, config: DedupConfig
) -> tuple[NDArray[np.uint32], UInt64s]:
    """Compute signatures and band keys in groups of documents."""
    layout = Layout.of(config)
    count = len(texts)
    if not config.near:
        return np.zeros((count, 0), dtype=np.uint32), np.zeros((0, count), dtype=np.uint64)
    signatures = np.empty((count, layout.columns), dtype=np.uint32)
    bands = np.empty((layout.bands, count), dtype=np.uint64)
    ends = np.cumsum(sizes)
    start = 0
    while start < count:
        before = int(ends[start] - sizes[start])
        full = int(np.searchsorted(ends, before + _GROUP_BYTES))
        stop = min(max(start + 1, full), start + _GROUP_DOCUMENTS, count)
        words = [normal_bytes(texts[number], encoded[number]) for number in range(start, stop)]
        signatures[start:stop], bands[:, start:stop] = make_signatures(*hash_words(words), layout)
        start = stop
    return signatures, bands

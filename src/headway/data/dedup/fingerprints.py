"""What deduplication knows about documents: hashes, sizes, MinHash signatures, hashes of paragraphs.

The prints of some documents are some hundred bytes for each, whatever their length. They depend on the texts and the
config alone, so they are made for each unit of input by itself, in any process, and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.config.data import DedupConfig
from headway.core.errors import DataError
from headway.core.faults import fault_point
from headway.core.files import atomic_write
from headway.core.foreign import open_regular
from headway.data.dedup.minhash import Layout, make_signatures
from headway.data.dedup.paragraphs import hash_paragraphs
from headway.data.dedup.words import UNICODE_VERSION, hash_words, normal_bytes

#: Changes whenever the same text would have other prints.
METHOD = 1
# The same for how texts are cut into paragraphs.
_PARAGRAPHS = 2

_MAGIC = b"headway-prints-1"
# Documents and bytes of text that are worked on at a time: their bins stay in the processor's cache.
_GROUP_DOCUMENTS = 256
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class DocumentPrints:
    """The prints of n documents with p paragraphs, in their order.

    Attributes:
        hashes: uint64 (n, 2), the first 128 bits of the SHA-256 of the text (UTF-8), big-endian.
        sizes: int64 (n,), bytes of the text in UTF-8.
        signatures: uint32 (n, columns), for the estimate of similarity; (n, 0) when near-duplicates are not wanted.
        bands: uint64 (bands, n), a key for each band, 0 for documents without words; (0, n) when not wanted.
        paragraph_hashes: uint64 (p,), of one document after the other, 0 for a paragraph that is left alone; (0,) when
            paragraphs are not wanted.
        paragraph_counts: int64 (n,), paragraphs of each document.
    """

    hashes: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    signatures: NDArray[np.uint32]
    bands: NDArray[np.uint64]
    paragraph_hashes: NDArray[np.uint64]
    paragraph_counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def save(self, path: Path) -> None:
        """Write all arrays to one file, atomically: a line that names the format, then each in NumPy's own format."""
        with atomic_write(path) as file:
            file.write(_MAGIC + b"\n")
            for field in fields(DocumentPrints):
                np.lib.format.write_array(file, np.ascontiguousarray(getattr(self, field.name)), allow_pickle=False)
                fault_point("dedup.prints")

    @staticmethod
    def load(path: Path) -> StoredPrints:
        """Open a file that `save` wrote. It is mapped when an array is asked for and stays open no longer than that.

        Raises:
            DataError: there is no such file, or it is damaged or of another format.
        """
        return StoredPrints(path)


class StoredPrints:
    """Prints in a file. A corpus has more of them than a process may have files open, so each is mapped when used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places = _read_places(path)

    def __len__(self) -> int:
        return int(self._places["sizes"][1][0])

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """As in `DocumentPrints`."""
        return self._map("hashes")

    @property
    def sizes(self) -> NDArray[np.int64]:
        """As in `DocumentPrints`."""
        return self._map("sizes")

    @property
    def signatures(self) -> NDArray[np.uint32]:
        """As in `DocumentPrints`."""
        return self._map("signatures")

    @property
    def bands(self) -> NDArray[np.uint64]:
        """As in `DocumentPrints`."""
        return self._map("bands")

    @property
    def paragraph_hashes(self) -> NDArray[np.uint64]:
        """As in `DocumentPrints`."""
        return self._map("paragraph_hashes")

    @property
    def paragraph_counts(self) -> NDArray[np.int64]:
        """As in `DocumentPrints`."""
        return self._map("paragraph_counts")

    def _map(self, name: str) -> NDArray[Any]:
        offset, shape = self._places[name]
        if 0 in shape:
            return np.zeros(shape, dtype=_DTYPES[name])
        return np.memmap(self.path, dtype=_DTYPES[name], mode="r", offset=offset, shape=shape)


class Prints(Protocol):
    """What `find_duplicates` reads: `DocumentPrints` or `StoredPrints`."""

    def __len__(self) -> int: ...
    @property
    def hashes(self) -> NDArray[np.uint64]: ...
    @property
    def sizes(self) -> NDArray[np.int64]: ...
    @property
    def signatures(self) -> NDArray[np.uint32]: ...
    @property
    def bands(self) -> NDArray[np.uint64]: ...
    @property
    def paragraph_hashes(self) -> NDArray[np.uint64]: ...
    @property
    def paragraph_counts(self) -> NDArray[np.int64]: ...


_DTYPES = {
    "hashes": "<u8",
    "sizes": "<i8",
    "signatures": "<u4",
    "bands": "<u8",
    "paragraph_hashes": "<u8",
    "paragraph_counts": "<i8",
}


def _read_places(path: Path) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """Offset and shape of each array in a file of prints."""
    places: dict[str, tuple[int, tuple[Any, ...]]] = {}
    try:
        with open_regular(path) as file:
            if file.readline(100) != _MAGIC + b"\n":
                raise ValueError("the file is of another format")
            for name, kind in _DTYPES.items():
                if np.lib.format.read_magic(file) != (1, 0):
                    raise ValueError("an array is of another version")
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                if fortran or dtype != np.dtype(kind):
                    raise ValueError(f"{name} is of another type")
                places[name] = (file.tell(), shape)
                file.seek(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
            if file.tell() != path.stat().st_size:
                raise ValueError("it has another length than its arrays")
    except (OSError, ValueError) as error:
        raise DataError(
            f"stored prints of documents cannot be read: {error}", where=str(path), fix="delete the file and try again"
        ) from None
    return places


def prints_recipe(config: DedupConfig) -> dict[str, Any]:
    """All that a document's prints depend on besides its text, as plain JSON, for keys of caches."""
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
        config: What is wanted: signatures only with `near`, hashes of paragraphs only with `paragraphs`.

    Returns:
        Prints in the order of the texts. Each depends on its own text and the config only.
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
    """The prints of several batches of documents as one; of none, those of no documents."""
    if len(parts) == 1:
        return parts[0]
    parts = parts or [fingerprint_documents([], config)]
    joined = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=int(field.name == "bands"))
        for field in fields(DocumentPrints)
    }
    return DocumentPrints(**joined)


def _paragraphs(texts: Sequence[str], config: DedupConfig) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    if not config.paragraphs:
        return np.zeros(0, dtype=np.uint64), np.zeros(len(texts), dtype=np.int64)
    hashes = [hash_paragraphs(text, config.paragraph_bytes) for text in texts]
    counts = np.fromiter(map(len, hashes), np.int64, len(texts))
    return np.fromiter((value for each in hashes for value in each), np.uint64, int(counts.sum())), counts


def _near(
    texts: Sequence[str], encoded: Sequence[bytes], sizes: NDArray[np.int64], config: DedupConfig
) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Signatures and band keys, a group of documents at a time."""
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

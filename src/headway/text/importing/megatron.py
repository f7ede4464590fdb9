"""Megatron-LM's indexed datasets: `<prefix>.bin` with the ids, `<prefix>.idx` with the sequences and documents.

The index (`megatron.core.datasets.indexed_dataset`, version 1), all little-endian: the magic `MMIDIDX\\0\\0`; uint64
version 1; uint8 code of the ids' type; uint64 number of sequences S; uint64 length of the document index D; int32[S]
tokens of each sequence; int64[S] its first byte in the .bin; int64[D] the first sequence of each document, and last S.
A sequence is a document, or a sentence of a document (`--split-sentences`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError, DataError
from headway.core.files.paths import expanded
from headway.text.importing.files import (
    BLOCK_DOCUMENTS,
    Ends,
    ImportSource,
    TokenFile,
    damaged,
    read_beginning,
    size_of,
    unreadable,
)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Codes of integer types; 6 and 7 are floating point. The last two are from fairseq.
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
_ENDINGS = (".idx", ".bin")


def find(paths: Sequence[str]) -> list[ImportSource]:
    """Find one source for each prefix.

    Args:
        paths: Prefixes, or one of a prefix's two files, or folders. As in Megatron's `--data-path`, each may follow its
            weight: `0.3 web_text_document 0.7 code_text_document`.

    Raises:
        ConfigError: a weight is not above 0.
        DataError: a file is missing, cannot be read, or is damaged.
    """
    sources = []
    for weight, path in _weighted(paths):
        prefixes = _prefixes(path)
        share = None if weight is None else weight / len(prefixes)
        sources += [ImportSource(_name(prefix), (open_file(prefix),), weight=share) for prefix in prefixes]
    return sources


def _weighted(paths: Sequence[str]) -> list[tuple[float | None, str]]:
    """Return paths with their weights, if they have any."""
    weights = [_number(path) for path in paths]
    if len(paths) % 2 or any(w is None for w in weights[::2]) or any(Path(path).exists() for path in paths[::2]):
        return [(None, path) for path in paths]
    wrong = next(
        (text for text, weight in zip(paths[::2], weights[::2], strict=True) if not 0 < (weight or 0) < inf), None
    )
    if wrong is not None:
        raise ConfigError(
            f"the weight {wrong} is not above 0", where="PATH", fix="give it a positive weight, or leave out its path"
        )
    return [(weight, path) for weight, path in zip(weights[::2], paths[1::2], strict=True)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _prefixes(path: str) -> list[Path]:
    place = expanded(path)
    if place.is_dir():
        found = sorted(index.with_suffix("") for index in place.glob("*.idx"))
        if not found:
            raise DataError("no Megatron index (*.idx) is in this folder", where=str(place), fix="check the path")
        return found
    return [Path(str(place).removesuffix(place.suffix)) if place.suffix in _ENDINGS else place]


def _name(prefix: Path) -> str:
    for ending in ("_text_document", "_text_sentence", "_document", "_sentence"):
        if prefix.name.removesuffix(ending) not in ("", prefix.name):
            return prefix.name.removesuffix(ending)
    return prefix.name


def open_file(prefix: Path) -> TokenFile:
    """Open the files of a prefix, and check their lengths; the index is checked while it is read.

    Raises:
        DataError: see `find`.
    """
    index, data = (prefix.with_name(prefix.name + ending) for ending in _ENDINGS)
    length = size_of(index)
    header = read_beginning(index, _HEADER.size)
    if not header.startswith(_MAGIC):
        raise DataError(
            "this is not a Megatron index: it does not begin with MMIDIDX", where=str(index), fix="check the path"
        )
    if len(header) < _HEADER.size:
        raise damaged(index, f"{length} bytes are too few for a header")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"the index has version {version}; only 1 is supported", where=str(index), fix="convert it")
    if code not in _TYPES:
        raise DataError(f"the file holds numbers of type {code}, not token ids", where=str(index), fix="check the path")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if sequences and length == expected + sequences:
        raise DataError("a multimodal dataset cannot be imported", where=str(index), fix="give a text-only dataset")
    if length != expected:
        raise damaged(
            index, f"{length:,} bytes, but {sequences:,} sequences and {documents - 1:,} documents need {expected:,}"
        )
    dtype = np.dtype(_TYPES[code])
    tables = _Tables(index, sequences, documents, dtype.itemsize)
    size = size_of(data)
    if size != tables.bytes:
        raise damaged(data, f"{size:,} bytes, but its index says {tables.bytes:,}")
    return TokenFile(data, dtype, 0, size // dtype.itemsize, ends=partial(_ends, tables), companions=(index,))


class _Tables:
    """The three arrays of an index, mapped on access, since a map keeps a file open and there may be thousands."""

    def __init__(self, index: Path, sequences: int, documents: int, width: int) -> None:
        self.index = index
        self.width = width
        self._sequences = sequences
        self._documents = documents
        last = int(self.documents()[-1]) if documents else 0
        if last != sequences:
            raise damaged(index, f"its documents end at sequence {last:,} of {sequences:,}")
        self.bytes = int(self.pointers()[-1]) + width * int(self.lengths()[-1]) if sequences else 0

    def lengths(self) -> NDArray[Any]:
        return _map(self.index, "<i4", self._sequences, _HEADER.size)

    def pointers(self) -> NDArray[Any]:
        return _map(self.index, "<i8", self._sequences, _HEADER.size + 4 * self._sequences)

    def documents(self) -> NDArray[Any]:
        return _map(self.index, "<i8", self._documents, _HEADER.size + 12 * self._sequences)


def _map(index: Path, dtype: str, count: int, offset: int) -> NDArray[Any]:
    if not count:
        return np.empty(0, dtype=dtype)
    try:
        return np.asarray(np.memmap(index, dtype=dtype, mode="r", shape=(count,), offset=offset))
    except OSError as error:
        raise unreadable(index, error) from None


def _ends(tables: _Tables) -> Ends:
    """Yield the ends of documents, in tokens, in blocks."""
    _check_sequences(tables)
    documents = tables.documents()
    pointers = tables.pointers()
    lengths = tables.lengths()
    previous = 0
    for first in range(0, len(documents), BLOCK_DOCUMENTS):
        block = np.asarray(documents[first : first + BLOCK_DOCUMENTS])
        if (np.diff(block, prepend=previous) < 0).any() or (first == 0 and block[0] != 0):
            raise damaged(tables.index, "its documents are not in order")
        previous = int(block[-1])
        # A document ends with its last sequence.
        last = np.maximum(block - 1, 0)
        ends = pointers[last] // tables.width + lengths[last]
        ends[block == 0] = 0
        yield ends[1:] if first == 0 else ends


def _check_sequences(tables: _Tables) -> None:
    """Check that sequences are contiguous."""
    expected = 0
    pointers = tables.pointers()
    all_lengths = tables.lengths()
    for first in range(0, len(all_lengths), BLOCK_DOCUMENTS):
        lengths = all_lengths[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        ends = expected + np.cumsum(lengths) * tables.width
        starts = np.concatenate([[expected], ends[:-1]])
        wrong = np.flatnonzero((pointers[first : first + BLOCK_DOCUMENTS] != starts) | (lengths < 0))
        if len(wrong):
            raise damaged(
                tables.index, f"sequence {first + int(wrong[0]):,} does not begin where the one before it ends"
            )
        expected = int(ends[-1])

"""Division of blocks of ids into documents, which are ended by the end-of-text token and written to shards by split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints
from headway.text.importing.files import TokenBlock
from headway.text.preparing.shards import ShardWriter

#: Number of a document's ids that decide its split, so that longer documents need not be held in memory.
DECIDING_TOKENS = 2**20

SPLIT_RULE = (
    "the first 64 bits of SHA-256(the document's first 2^20 ids as little-endian uint32, without the end-of-text token)"
    " < bound: validation"
)


@dataclass
class Counts:
    """Counts of documents and tokens."""

    documents: int = 0
    tokens: int = 0
    """Tokens in the store, end-of-text tokens included."""
    begun: int = 0
    """Documents that begin with the begin-of-text token."""
    ended: int = 0
    """Documents to which the end-of-text token was added."""
    empty: int = 0
    """Documents without any other token; they are skipped."""
    smallest: int = 2**64
    """Smallest document hash, if documents are held out by hash; `largest` is the largest one."""
    largest: int = -1


class ShardSeries:
    """The shards of one source in one split, written one after the other.

    Args:
        folder: `<split>/<source>` of the store under construction.
        dtype: Data type of ids in the store.
        shard_bytes: A shard is complete when a document ends beyond this size.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self._folder = folder
        self._dtype = dtype
        self._limit = shard_bytes // dtype.itemsize
        self._writer: ShardWriter | None = None
        self.entries: list[dict[str, Any]] = []
        """Entries of the complete shards, as in the manifest."""

    def append(self, ids: NDArray[Any], ends: Ints) -> None:
        """Add ids; documents end before the places `ends`, and the last one may continue in the next call."""
        while len(ids) or len(ends):
            if self._writer is None:
                self._writer = ShardWriter(self._folder, f"{len(self.entries):05d}")
            over = int(np.searchsorted(ends, self._limit - self._writer.tokens))
            cut = int(ends[over]) if over < len(ends) else len(ids)
            self._writer.write(ids[:cut].astype(self._dtype, copy=False), ends[: over + 1])
            if over < len(ends):
                self.finish()
            ids = ids[cut:]
            ends = ends[over + 1 :] - cut

    def finish(self) -> None:
        """Close the open shard, if there is one. Its last document must have ended."""
        entry = self._writer.finish() if self._writer is not None else None
        if entry is not None:
            self.entries.append(entry)
        self._writer = None


@dataclass
class DocumentWriter:
    """Writer of the documents of a source to its splits.

    Attributes:
        series: Shards of training and validation documents.
        end: The end-of-text token.
        bound: Training documents with a hash below it are held out.
        begin: The begin-of-text token, if there is one.
        counts: Counts so far.
    """

    series: dict[str, ShardSeries]
    end: int
    bound: int
    begin: int | None = None
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._open: NDArray[Any] | None = None  # ids of an unfinished document that is not written yet
        self._begun: str | None = None  # split of an unfinished document whose beginning is already written
        self._last = -1  # the last id of that document

    def add(self, block: TokenBlock, split: str) -> None:
        """Add a block that belongs to a split."""
        ids = block.ids
        ends = block.ends
        if self._begun is not None:
            ids, ends = self._continue_document(ids, ends)
        if self._open is not None and len(self._open):
            ids = np.concatenate([self._open, ids])
            ends = ends + len(self._open)
        whole = int(ends[-1]) if len(ends) else 0
        self._open = ids[whole:]
        if len(ends):
            self._write(ids[:whole], ends, split)
        if len(self._open) >= DECIDING_TOKENS:
            self._begin(split)

    def end_document(self, split: str) -> None:
        """End the unfinished document, if there is one."""
        if self._begun is not None or (self._open is not None and len(self._open)):
            self.add(TokenBlock(np.empty(0, dtype=np.uint16), np.zeros(1, dtype=np.int64)), split)

    def finish(self) -> None:
        """Close the shards, after the last document has ended."""
        for series in self.series.values():
            series.finish()

    def _begin(self, split: str) -> None:
        """Write the beginning of a document that is too long for memory."""
        assert self._open is not None
        if split == "train" and self.bound:
            split = "validation" if self._hash(self._open[:DECIDING_TOKENS].astype("<u4")) < self.bound else split
        self.counts.begun += int(self._open[0] == self.begin)
        self.series[split].append(self._open, np.empty(0, dtype=np.int64))
        self.counts.tokens += len(self._open)
        self._begun = split
        self._last = int(self._open[-1])
        self._open = None

    def _continue_document(self, ids: NDArray[Any], ends: Ints) -> tuple[NDArray[Any], Ints]:
        """Write the ids that belong to the begun document, and return the rest."""
        assert self._begun is not None
        count = int(ends[0]) if len(ends) else len(ids)
        part = ids[:count]
        self._last = int(part[-1]) if count else self._last
        if len(ends) and self._last != self.end:
            part = np.append(part, np.array([self.end], dtype=np.int64))
            self.counts.ended += 1
        self.series[self._begun].append(part, np.full(min(1, len(ends)), len(part), dtype=np.int64))
        self.counts.tokens += len(part)
        if len(ends):
            self.counts.documents += 1
            self._begun = None
        return ids[count:], ends[1:] - count

    def _write(self, ids: NDArray[Any], ends: Ints, split: str) -> None:
        """Write whole documents."""
        ids, ends = self._without_empty(ids, ends)
        if not len(ends):
            return
        held_out = self._held_out(ids, ends) if split == "train" and self.bound else None
        if held_out is None or not held_out.any():
            self._append(ids, ends, split)
            return
        lengths = np.diff(ends, prepend=0)
        for side, chosen in (("train", ~held_out), ("validation", held_out)):
            self._append(ids[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen]), side)

    def _without_empty(self, ids: NDArray[Any], ends: Ints) -> tuple[NDArray[Any], Ints]:
        """Remove documents that have no token except end-of-text."""
        lengths = np.diff(ends, prepend=0)
        alone = lengths == 1
        alone[alone] = ids[ends[alone] - 1] == self.end
        empty = alone | (lengths == 0)
        if not empty.any():
            return ids, ends
        self.counts.empty += int(empty.sum())
        return ids[np.repeat(~empty, lengths)], np.cumsum(lengths[~empty])

    def _append(self, ids: NDArray[Any], ends: Ints, split: str) -> None:
        """Append documents, and add missing end-of-text tokens."""
        if not len(ends):
            return
        missing = ids[ends - 1] != self.end
        count = int(missing.sum())
        if count:
            ids = np.insert(ids.astype(np.int64), ends[missing], self.end)
            ends = ends + np.cumsum(missing)
        self.series[split].append(ids, ends)
        if self.begin is not None:
            self.counts.begun += int((ids[np.concatenate([[0], ends[:-1]])] == self.begin).sum())
        self.counts.ended += count
        self.counts.documents += len(ends)
        self.counts.tokens += len(ids)

    def _held_out(self, ids: NDArray[Any], ends: Ints) -> Bools:
        """Return for each document whether its hash is below the bound."""
        wide = np.ascontiguousarray(ids, dtype="<u4")
        # A document may or may not include its end-of-text token.
        last = ends - (ids[ends - 1] == self.end)
        starts = np.concatenate([[0], ends[:-1]])
        hashes = [
            self._hash(wide[start : min(stop, start + DECIDING_TOKENS)])
            for start, stop in zip(starts.tolist(), last.tolist(), strict=True)
        ]
        return np.array([value < self.bound for value in hashes], dtype=bool)

    def _hash(self, ids: NDArray[np.uint32]) -> int:
        value = int.from_bytes(hashlib.sha256(ids.view(np.uint8).data).digest()[:8], "big")
        self.counts.smallest = min(self.counts.smallest, value)
        self.counts.largest = max(self.counts.largest, value)
        return value

"""Rows: how a token store is cut into training sequences.

A row has T inputs and the target after the last one: T + 1 tokens. Rows are numbered within each source;
`headway.data.feeding.plan` decides which of them a step reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints
from headway.core.errors import DataError
from headway.data.feeding.packing import Packing, PackingFigures, of_trained_rows
from headway.data.feeding.packing_plans import open_figures, open_plan
from headway.data.store import PACKING, TokenStore

# Above this share of padding, `best_fit` is a poor choice. Where some documents are short, the share is far lower.
_MUCH_PADDING = 0.005
#: Document indexes of shards that stay in memory; any other is read again when a row needs it.
_KEPT_INDEXES = 32


@dataclass(frozen=True)
class RowBlock:
    """Some rows, as read."""

    tokens: Ints
    """Inputs and the target after the last one, (n, T + 1)."""
    documents: NDArray[np.int32] | None = None
    """Number of each token's document within its row, -1 for padding, (n, T + 1); None where it is not needed."""
    masked: bool = False
    """Attention stays within each document of a row."""
    continued: Bools | None = None
    """First tokens of pieces that continue a document from another row, where the token is a target already,
    (n, T + 1); None where there are none."""
    trained: Bools | None = None
    """Whether each token is trained (the store's loss mask), (n, T + 1); None where all are."""

    def __len__(self) -> int:
        return len(self.tokens)


def join_blocks(blocks: Sequence[RowBlock], places: Sequence[NDArray[np.intp]]) -> RowBlock:
    """Join rows that were read separately, for example from several sources, into one block.

    Args:
        blocks: At least one block. All have one length T, and either all or none have documents.
        places: For each block, the places of its rows; together they are every place from 0 on, each once.
    """
    if len(blocks) == 1 and np.array_equal(places[0], np.arange(len(blocks[0]))):
        return blocks[0]
    first = blocks[0]
    count = sum(map(len, blocks))
    tokens = np.empty((count, first.tokens.shape[1]), dtype=np.int64)
    documents = None if first.documents is None else np.empty(tokens.shape, dtype=np.int32)
    continued = None if first.continued is None else np.empty(tokens.shape, dtype=np.bool_)
    trained = None if all(block.trained is None for block in blocks) else np.ones(tokens.shape, dtype=np.bool_)
    for block, place in zip(blocks, places, strict=True):
        tokens[place] = block.tokens
        if trained is not None and block.trained is not None:
            trained[place] = block.trained
        if documents is not None and block.documents is not None:
            documents[place] = block.documents
        if continued is not None and block.continued is not None:
            continued[place] = block.continued
    return RowBlock(tokens, documents, first.masked, continued, trained)


class SourceRows(Protocol):
    """The rows of one source in one split, numbered from 0."""

    @property
    def count(self) -> int:
        """Number of rows."""
        ...

    def read(self, rows: Ints) -> RowBlock:
        """Read rows by number, int64 (n,), in the given order, into memory that the caller owns."""
        ...

    def figures(self) -> PackingFigures:
        """Return how the source's documents fill its rows."""
        ...


def open_rows(
    store: TokenStore,
    split: str,
    source: str,
    sequence_length: int,
    packing: str = "concat",
    *,
    document_mask: bool = False,
) -> SourceRows:
    """Open the rows of one source.

    Args:
        store: The store.
        split: A split of the store.
        source: A source of the split.
        sequence_length: Inputs per row, T.
        packing: `data.packing`. All but `concat` need a plan, which the first start makes (see `packing_plans`).
        document_mask: `data.document_mask`.
    """
    if packing == "concat":
        return ConcatRows(store, split, source, sequence_length, masked=document_mask)
    if packing not in get_args(Packing):
        raise ValueError(f"there is no packing '{packing}'")
    return PackedRows(store, split, source, sequence_length, cast(Packing, packing), masked=document_mask)


class _StoredRows:
    def __init__(self, store: TokenStore, split: str, source: str, sequence_length: int, *, masked: bool) -> None:
        self._store = store
        self._split = split
        self._source = source
        self._length = sequence_length
        self._masked = masked
        self._has_mask = store.has_mask(split, source)


class ConcatRows(_StoredRows):
    """Documents one after another, cut at row ends: row `r` is tokens [r * T, r * T + T + 1) of the source."""

    def __init__(self, store: TokenStore, split: str, source: str, sequence_length: int, *, masked: bool) -> None:
        super().__init__(store, split, source, sequence_length, masked=masked)
        self._numbers: Ints | None = None  # of the rows with a target, where others are left out
        self._trained_figures: PackingFigures | None = None
        self.count = max(0, store.tokens(split, source) - 1) // sequence_length
        if store.leaves_out_rows(split, source):
            plan, self._trained_figures = open_plan(store, split, source, sequence_length, "trained")
            self._numbers = plan.starts.astype(np.int64) // sequence_length
            self.count = len(self._numbers)
        firsts = [shard.first_token for shard in store.shards(split, source)] if masked else []
        self._firsts = np.array(firsts, dtype=np.int64)
        # Only some shards: the bounds of all documents would take 8 bytes each, in every worker.
        self._bounds_of = lru_cache(_KEPT_INDEXES)(self._read_bounds)

    def read(self, rows: Ints) -> RowBlock:
        """Read rows by number."""
        rows = rows if self._numbers is None else self._numbers[rows]
        tokens = np.empty((len(rows), self._length + 1), dtype=np.int64)
        if not self._store.at_hand:
            self._store.want(self._split, self._source, rows * self._length, self._length + 1, index=self._masked)
        for place, row in enumerate(rows.tolist()):
            tokens[place] = self._store.read(self._split, self._source, row * self._length, self._length + 1)
        return RowBlock(tokens, self._documents(rows), self._masked, trained=self._trained(rows))

    def _trained(self, rows: Ints) -> Bools | None:
        if not self._has_mask:
            return None
        trained = np.empty((len(rows), self._length + 1), dtype=np.bool_)
        for place, start in enumerate((rows * self._length).tolist()):
            mask = self._store.read_mask(self._split, self._source, start, self._length + 1)
            assert mask is not None
            trained[place] = mask
        return trained

    def _documents(self, rows: Ints) -> NDArray[np.int32] | None:
        if not self._masked:
            return None
        documents = np.zeros((len(rows), self._length + 1), dtype=np.int32)
        starts = rows * self._length
        low = np.searchsorted(self._firsts, starts, side="right") - 1
        high = np.searchsorted(self._firsts, starts + self._length + 1, side="left")
        for place, (start, first, last) in enumerate(zip(starts.tolist(), low.tolist(), high.tolist(), strict=True)):
            for shard in range(first, last):
                bounds = self._bounds_of(shard)
                inside = slice(*np.searchsorted(bounds, (start + 1, start + self._length + 1)))
                documents[place, bounds[inside] - start] = 1
        return np.cumsum(documents, axis=1, dtype=np.int32)

    def _read_bounds(self, shard: int) -> Ints:
        return self._store.shard_documents(self._split, self._source, shard).astype(np.int64)

    def figures(self) -> PackingFigures:
        """Return the figures, which are counted once from the document index."""
        figures = open_figures(self._store, self._split, self._source, self._length)
        return (
            figures if self._trained_figures is None else of_trained_rows(figures, self._trained_figures, self._length)
        )


class PackedRows(_StoredRows):
    """Rows that follow a plan: whole documents, or pieces of documents longer than a row, then end-of-text padding."""

    def __init__(
        self, store: TokenStore, split: str, source: str, sequence_length: int, packing: Packing, *, masked: bool
    ) -> None:
        super().__init__(store, split, source, sequence_length, masked=masked)
        self._plan, self._figures = open_plan(store, split, source, sequence_length, packing)
        self.count = self._figures.rows

    def read(self, rows: Ints) -> RowBlock:
        """Read rows by number.

        Raises:
            DataError: The plan does not fit the store.
        """
        tokens = np.full((len(rows), self._length + 1), self._store.end_of_text_id, dtype=np.int64)
        documents = np.full(tokens.shape, -1, dtype=np.int32)
        continued = np.zeros(tokens.shape, dtype=np.bool_)
        trained = np.ones(tokens.shape, dtype=np.bool_) if self._has_mask else None
        low = self._plan.rows[rows].tolist()
        high = self._plan.rows[rows + 1].tolist()
        if not self._store.at_hand:
            pieces = [self._plan.starts[first:last] for first, last in zip(low, high, strict=True)]
            # A piece belongs to one document, and a document lies in one shard: its first token finds the shard.
            self._store.want(self._split, self._source, np.concatenate(pieces).astype(np.int64), 1)
        for place, (first, last) in enumerate(zip(low, high, strict=True)):
            starts = self._plan.starts[first:last].tolist()
            lengths = self._plan.lengths[first:last].tolist()
            continues = self._plan.continued[first:last].tolist()
            end = 0
            for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                piece = self._piece(start, length, self._length + 1 - end)
                tokens[place, end : end + length] = piece
                documents[place, end : end + length] = number
                continued[place, end] = continues[number]
                if trained is not None:
                    mask = self._store.read_mask(self._split, self._source, start, length)
                    assert mask is not None
                    trained[place, end : end + length] = mask
                end += length
        return RowBlock(tokens, documents, self._masked, continued, trained)

    def _piece(self, start: int, length: int, room: int) -> NDArray[np.integer[Any]]:
        try:
            if length <= room:
                return self._store.read(self._split, self._source, start, length)
        except IndexError:
            pass
        raise DataError(
            f"the packing of source '{self._source}' is damaged: it has {length} tokens from {start} on in a row with"
            f" room for {room}",
            where=str(self._store.path / PACKING),
            fix="remove that folder (the next start makes it again), then: headway data verify",
        )

    def figures(self) -> PackingFigures:
        """Return the figures, which are counted when the plan is made."""
        return self._figures


def packing_notice(figures: Mapping[str, PackingFigures], packing: str) -> str:
    """Describe in one line how the documents of each source fill their rows, for the start of a run."""
    parts = []
    for source, of in figures.items():
        left_out = f", {of.left_out_documents:,} of one token left out" if of.left_out_documents else ""
        parts.append(
            f"{source} {of.rows:,} rows, padding {of.padding_share:.2%}, {of.cut_share:.1%} of documents cut{left_out}"
        )
    return f"packing {packing}: {'; '.join(parts)}".replace("%", " %")


def padding_warning(figures: Mapping[str, PackingFigures], length: int) -> str | None:
    """Return a warning if `best_fit` leaves much padding in rows of a length, or None."""
    parts = [f"{name} {of.padding_share:.2%}" for name, of in figures.items() if of.padding_share > _MUCH_PADDING]
    text = (
        f"packing best_fit: more than {_MUCH_PADDING:.1%} of rows of {length:,} tokens is padding ({', '.join(parts)}),"
        " since too few documents are short enough to fill them; data.packing: concat has none"
    )
    return text.replace("%", " %") if parts else None

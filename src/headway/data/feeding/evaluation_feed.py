"""Held-out rows of a token store, the same in every evaluation."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np

from headway.config.sections.data import DataConfig, sources_of_role
from headway.core.errors import DataError
from headway.core.types import MicroBatch
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.split import SplitRows
from headway.data.store import TokenStore


class EvaluationFeed:
    """The held-out rows of every evaluation, evenly spaced over a split.

    Args:
        store: The store.
        split: Name of the split.
        sequence_length: Tokens per row, T.
        limit: Maximum number of rows; all when None.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        packing: `data.packing`.
        document_mask: `data.document_mask`.
        parts: Number of equal parts into which workers cut every row.
        only: Names of sources; the others are omitted.

    Tokens at a source's end that do not fill a row are omitted. If no source fills a row, the longest one gives one
    shorter row, so that a tiny split can still be evaluated.

    Raises:
        DataError: The split has fewer than two tokens, or too few for a row that can be cut.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        split: str = "validation",
        sequence_length: int,
        limit: int | None = None,
        micro_batch: int,
        packing: Literal["concat", "best_fit", "pad"] = "concat",
        document_mask: bool = False,
        parts: int = 1,
        only: Collection[str] | None = None,
    ) -> None:
        names = [name for name in store.sources(split) if only is None or name in only]
        longest = max((store.tokens(split, name) for name in names), default=0)
        if longest < 2:
            of = "" if only is None else f" of {', '.join(sorted(only))}"
            raise DataError(
                f"split '{split}' holds no text{of} to evaluate on", where=str(store.path), fix="raise data.validation"
            )
        if longest <= parts:
            raise DataError(
                f"split '{split}' is too short to evaluate on: the longest source has {longest:,} tokens, and rows are"
                f" cut into {parts} parts",
                where=str(store.path),
                fix="raise data.validation, or lower parallel.context or parallel.tensor",
            )
        length = min(sequence_length, longest - 1)
        self._length = length - length % parts
        self._micro_batch = micro_batch
        self._rows = SplitRows(store, split, self._length, packing=packing, document_mask=document_mask, only=only)
        self._starts = np.cumsum([0, *self._rows.counts(self._length)])
        self._total = int(self._starts[-1])
        self.rows = self._total if limit is None else min(limit, self._total)
        """Rows of one evaluation."""

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return -(-self.rows // self._micro_batch)

    def batch(self, index: int) -> MicroBatch:
        """Read micro-batch `index`: `ids` and `targets`, int64 (rows, T) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        places = range(index * self._micro_batch, min((index + 1) * self._micro_batch, self.rows))
        chosen = np.array([place * self._total // self.rows for place in places], dtype=np.int64)
        sources = np.searchsorted(self._starts, chosen, side="right") - 1
        return micro_batch_of(self._rows.read(self._length, sources, chosen - self._starts[sources]))


class EvaluationWithReplay:
    """The held-out rows of the sources to learn from, followed by those of the replayed ones.

    Args:
        own: Rows of the sources to learn from.
        replay: Rows of the replayed ones.
    """

    def __init__(self, own: EvaluationFeed, replay: EvaluationFeed) -> None:
        self._own = own
        self._replay = replay

    @property
    def replay_from(self) -> int:
        """Number of the first micro-batch of replayed sources."""
        return len(self._own)

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return len(self._own) + len(self._replay)

    def batch(self, index: int) -> MicroBatch:
        """Read micro-batch `index`."""
        first = self.replay_from
        return self._own.batch(index) if index < first else self._replay.batch(index - first)


def evaluation_feed(
    data: DataConfig,
    store: TokenStore,
    *,
    split: str = "validation",
    sequence_length: int,
    limit: int | None,
    micro_batch: int,
    parts: int = 1,
) -> EvaluationFeed | EvaluationWithReplay:
    """Open the rows that evaluations use: those of replayed sources by themselves, if there are any.

    Args:
        data: The config of the run.
        store, split, sequence_length, limit, micro_batch, parts: As in `EvaluationFeed`; the limit is for each role.

    Raises:
        DataError: A role has too little text to evaluate on.
    """

    def opened(only: Collection[str] | None) -> EvaluationFeed:
        return EvaluationFeed(
            store,
            split=split,
            sequence_length=sequence_length,
            limit=limit,
            micro_batch=micro_batch,
            packing=data.packing,
            document_mask=data.document_mask,
            parts=parts,
            only=only,
        )

    replayed = set(sources_of_role(data.sources, "replay"))
    if not replayed & {source["name"] for source in store.manifest["sources"]}:
        return opened(None)
    others = {source["name"] for source in store.manifest["sources"]} - replayed
    return EvaluationWithReplay(opened(others), opened(replayed))

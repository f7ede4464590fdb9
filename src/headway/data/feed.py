"""Batches as a pure function of (step, lane), from a token store or from any map-style dataset.

Row numbers run over the sources of a split in order; row `r` of a source is its tokens [r * T, r * T + T + 1), the last
one only as a target. A step takes the next rows of an endless shuffled sequence of epochs: lane by lane, micro-batch by
micro-batch. Every row is used exactly once per epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from headway.core.errors import DataError
from headway.core.types import MicroBatch
from headway.data.order import RowOrder
from headway.data.prefetch import Prefetcher
from headway.data.store import TokenStore

__all__ = ["TokenFeed", "EvaluationFeed", "DatasetFeed", "DatasetEvaluationFeed", "Prefetcher"]

# Positions that `rows_by_source` computes at a time: 8 MiB of them.
_CHUNK = 2**20


class _Rows:
    """The rows of one split of a store.

    Attributes:
        sources: Names of the sources that have rows.
        counts: Rows of each.
    """

    def __init__(self, store: TokenStore, split: str, sequence_length: int) -> None:
        self.store, self.split, self.sequence_length = store, split, sequence_length
        rows = {name: max(0, store.tokens(split, name) - 1) // sequence_length for name in store.sources(split)}
        self.sources = [name for name, count in rows.items() if count]
        self.counts = [rows[name] for name in self.sources]
        self.starts = np.array([*accumulate(self.counts, initial=0)], dtype=np.int64)

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    def source_of(self, rows: NDArray[np.int64]) -> NDArray[np.intp]:
        """Number of the source of each row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of rows with the target after the last: int64 (rows, sequence_length + 1)."""
        length = self.sequence_length
        tokens = np.empty((len(rows), length + 1), dtype=np.int64)
        sources = self.source_of(rows)
        offsets = (rows - self.starts[sources]) * length
        for row, (source, offset) in enumerate(zip(sources.tolist(), offsets.tolist(), strict=True)):
            tokens[row] = self.store.read(self.split, self.sources[source], offset, length + 1)
        return tokens


def _micro_batch(tokens: NDArray[np.int64]) -> MicroBatch:
    """Inputs and next-token targets, int64 (rows, T) each, from tokens (rows, T + 1)."""
    rows = torch.from_numpy(tokens)
    return {"ids": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


class TokenFeed:
    """Training rows of a token store.

    Args:
        store: The store.
        split: Which split.
        sequence_length: Tokens per row, T.
        seed: Seed of the run: decides the order of rows.
        lanes: Lanes of a step.
        micro_batches: Micro-batches of a lane.
        micro_batch: Rows of a micro-batch.

    Raises:
        DataError: no source has enough tokens for one row.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        split: str = "train",
        sequence_length: int,
        seed: int,
        lanes: int,
        micro_batches: int,
        micro_batch: int,
    ) -> None:
        self._rows = _Rows(store, split, sequence_length)
        if not self._rows.total:
            longest = max((store.tokens(split, name) for name in store.sources(split)), default=0)
            raise DataError(
                f"no source has the {sequence_length + 1:,} tokens of one row in split '{split}': the longest has"
                f" {longest:,}",
                where=str(store.path),
                fix="prepare more text, or lower train.sequence_length",
            )
        self._order = RowOrder(self._rows.total, seed)
        self._lane_rows, self._micro_batch = micro_batches * micro_batch, micro_batch
        self._step_rows = lanes * self._lane_rows

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        return self._rows.total

    def batch(self, step: int, lane: int) -> list[MicroBatch]:
        """Micro-batches of one lane of one step: `ids` and `targets`, int64 (micro_batch, T) each."""
        rows = self._order.at(step * self._step_rows + lane * self._lane_rows, self._lane_rows)
        tokens = self._rows.read(rows)
        return [_micro_batch(tokens[i : i + self._micro_batch]) for i in range(0, len(rows), self._micro_batch)]

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Rows of each source that steps `first_step` to `last_step` (exclusive) consume."""
        position, end = first_step * self._step_rows, last_step * self._step_rows
        counts = np.zeros(len(self._rows.counts), dtype=np.int64)
        while position < end:
            left_in_epoch = self.rows - position % self.rows
            if left_in_epoch == self.rows and end - position >= self.rows:
                # Whole epochs have every row once: nothing to compute.
                epochs = (end - position) // self.rows
                counts += epochs * np.array(self._rows.counts, dtype=np.int64)
                position += epochs * self.rows
                continue
            count = min(left_in_epoch, end - position, _CHUNK)
            sources = self._rows.source_of(self._order.at(position, count))
            counts += np.bincount(sources, minlength=len(counts))
            position += count
        return dict(zip(self._rows.sources, counts.tolist(), strict=True))


class EvaluationFeed:
    """The same held-out rows each time, evenly spaced over a split.

    Args:
        store: The store.
        split: Which split.
        sequence_length: Tokens per row, T.
        limit: Rows at most; all when None.
        micro_batch: Rows of a micro-batch; the last one may have fewer.

    Tokens at a source's end that fill no row are left out; but when not even one row is full, the longest source gives
    one shorter row, so that a tiny split can still be evaluated.

    Raises:
        DataError: the split has no two tokens.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        split: str = "validation",
        sequence_length: int,
        limit: int | None = None,
        micro_batch: int,
    ) -> None:
        longest = max((store.tokens(split, name) for name in store.sources(split)), default=0)
        if longest < 2:
            raise DataError(
                f"split '{split}' holds no text to evaluate on", where=str(store.path), fix="raise data.validation"
            )
        self._rows = _Rows(store, split, min(sequence_length, longest - 1))
        count = self._rows.total if limit is None else min(limit, self._rows.total)
        self._chosen = np.array([i * self._rows.total // count for i in range(count)], dtype=np.int64)
        self._micro_batch = micro_batch

    @property
    def rows(self) -> int:
        """Rows of one evaluation."""
        return len(self._chosen)

    def __len__(self) -> int:
        """Micro-batches of one evaluation."""
        return -(-len(self._chosen) // self._micro_batch)

    def batch(self, index: int) -> MicroBatch:
        """Micro-batch `index`: `ids` and `targets`, int64 (rows, T) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        start = index * self._micro_batch
        return _micro_batch(self._rows.read(self._chosen[start : start + self._micro_batch]))


class DatasetFeed:
    """Rows of any map-style dataset: an object with `__len__` and `__getitem__` that is a pure function of the index.

    Args:
        dataset: The dataset.
        seed: Seed of the run: decides the order of rows.
        lanes: Lanes of a step.
        micro_batches: Micro-batches of a lane.
        micro_batch: Rows of a micro-batch.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.

    Raises:
        DataError: the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        lanes: int,
        micro_batches: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not len(dataset):
            raise DataError("the dataset has no rows", where=type(dataset).__name__)
        self._dataset, self._collate = dataset, collate or default_collate
        self._order = RowOrder(len(dataset), seed)
        self._lane_rows, self._micro_batch = micro_batches * micro_batch, micro_batch
        self._step_rows = lanes * self._lane_rows

    @property
    def rows(self) -> int:
        """Rows in one epoch."""
        return self._order.rows

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        """Micro-batches of one lane of one step, as `collate` makes them."""
        order = self._order.at(step * self._step_rows + lane * self._lane_rows, self._lane_rows)
        rows = [self._dataset[index] for index in order.tolist()]
        return [self._collate(rows[i : i + self._micro_batch]) for i in range(0, len(rows), self._micro_batch)]

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Rows that steps `first_step` to `last_step` (exclusive) consume, under the one name "dataset"."""
        return {"dataset": (last_step - first_step) * self._step_rows}


class DatasetEvaluationFeed:
    """All rows of a map-style dataset in their order.

    Args:
        dataset: The dataset.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.
    """

    def __init__(self, dataset: Any, *, micro_batch: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset, self._micro_batch, self._collate = dataset, micro_batch, collate or default_collate

    def __len__(self) -> int:
        """Micro-batches of one evaluation."""
        return -(-len(self._dataset) // self._micro_batch)

    def batch(self, index: int) -> Any:
        """Micro-batch `index`, as `collate` makes it."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        start = index * self._micro_batch
        end = min(start + self._micro_batch, len(self._dataset))
        return self._collate([self._dataset[row] for row in range(start, end)])

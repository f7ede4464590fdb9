"""Rows of token ids computed from their number: no file is read, and the rows do not depend on the number of
workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headway.config import LaneGrid
from headway.core.arrays import Ints, UInt64s
from headway.core.random import derive_seed
from headway.core.types import MicroBatch


class SyntheticFeed:
    """A `Feed` of token ids whose frequencies fall like those of words, so that there is something to learn.

    Args:
        seed: Seed of the ids.
        vocab_size: Ids are smaller than this.
        sequence_length: Tokens of a row.
        grid: How the rows of a step are cut.
    """

    rows = 2**62

    def __init__(self, seed: int, vocab_size: int, sequence_length: int, grid: LaneGrid) -> None:
        self._offset = np.uint64(derive_seed(seed, "bench"))
        self._vocab_size = vocab_size
        self._length = sequence_length
        self._grid = grid

    def batch(self, step: int, lane: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of one lane of one step."""
        grid = self._grid
        per_lane = grid.micro_batches * grid.micro_batch
        tokens = self._tokens((step * grid.lanes + lane) * per_lane, per_lane)
        return [
            {"ids": part[:, :-1].contiguous(), "targets": part[:, 1:].contiguous()}
            for part in torch.from_numpy(tokens).split(grid.micro_batch)
        ]

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Return the rows of steps `first_step` to `last_step` (exclusive)."""
        per_step = self._grid.lanes * self._grid.micro_batches * self._grid.micro_batch
        return {"synthetic": (last_step - first_step) * per_step}

    def describe(self, last_step: int) -> dict[str, Any]:
        """Return the parameters that determine the rows."""
        return {"synthetic": {"offset": int(self._offset), "vocab_size": self._vocab_size}}

    def metrics(self, step: int) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def _tokens(self, first_row: int, rows: int) -> Ints:
        """Return token ids of shape `(rows, length + 1)`."""
        width = self._length + 1
        numbers = np.arange(first_row * width, (first_row + rows) * width, dtype=np.uint64) + self._offset
        share = (_mixed(numbers) >> np.uint64(11)).astype(np.float64) / 2**53
        ids: Ints = (share**3 * self._vocab_size).astype(np.int64)
        return ids.reshape(rows, width)


def _mixed(x: UInt64s) -> UInt64s:
    """Apply the output function of SplitMix64 (Steele, Lea & Flood 2014, figure 17); arithmetic is modulo 2^64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

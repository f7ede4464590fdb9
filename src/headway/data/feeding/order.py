"""The order of rows: a seeded permutation that is computed, not stored.

A Feistel network is a bijection on fixed-width integers whatever its round function is (Luby & Rackoff 1988). Values
that fall outside the range are sent through it again until they are inside (cycle walking; Black & Rogaway 2002,
section 4), which keeps it a bijection on any range. So the row at any position of any epoch is known at once, with no
memory and no generator to replay.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headway.core.arrays import Ints, UInt64s
from headway.core.random import derive_seed

# Four rounds suffice for wide halves (Luby & Rackoff); narrow halves mix less per round. Even, so that the two halves,
# which may differ by one bit, end up where they began.
_ROUNDS = 8

# Rows that `RowOrder` permutes at a time: about 0.5 ms of work.
_BLOCK = 4096


def permute(index: Ints, size: int, key: int) -> Ints:
    """Send positions to rows by the permutation of `range(size)` that belongs to `key`.

    Args:
        index: int64, any shape, values in [0, size).
        size: Length of the range, 1 to 2**62.
        key: Non-negative integer; other keys give unrelated permutations.

    Returns:
        int64 of the same shape, values in [0, size).

    Raises:
        ValueError: `size` or a value of `index` is out of range.
    """
    if not 1 <= size <= 2**62:
        raise ValueError(f"size must be in 1..2**62, got {size}")
    index = np.asarray(index, dtype=np.int64)
    if index.size and (index.min() < 0 or index.max() >= size):
        raise ValueError(f"index must be in [0, {size})")
    bits = max(2, (size - 1).bit_length())
    keys = np.array([derive_seed(key, "feistel", number) for number in range(_ROUNDS)], dtype=np.uint64)
    # The network's domain is less than twice the range (for more than 2 values), so a walk takes 2 passes on average;
    # it always ends, since a cycle leads back to its start, which is inside.
    values = _feistel(index.ravel().astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64).reshape(index.shape)


def _feistel(values: UInt64s, bits: int, keys: UInt64s) -> UInt64s:
    """Pass `bits`-wide values through the network once."""
    low = bits // 2
    high = bits - low
    left = values >> np.uint64(low)
    right = values & np.uint64((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) >> np.uint64(64 - high))
        low, high = high, low
    return (left << np.uint64(low)) | right


def mix(values: UInt64s) -> UInt64s:
    """Apply the finalizer of SplitMix64 (Steele, Lea & Flood 2014, figure 16): every input bit reaches the top bits.

    It is a bijection of the 64-bit numbers, so different values stay different.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Opening(Protocol):
    """The rows that remain of an epoch when a run is changed in the middle of it."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        ...

    @property
    def count(self) -> int:
        """Number of rows that remain."""
        ...

    def rows(self, items: Ints) -> Ints:
        """Return the row numbers of some remaining rows, int64 (n,).

        Args:
            items: Indices into the remaining rows, counted from 0 in an order that follows from the run's past, (n,).
        """
        ...


class RowOrder:
    """The row at each position of an endless sequence of epochs, each with its own shuffle.

    Args:
        rows: Rows in one epoch, at least 1.
        seed: Seed of the run.
        purpose: Further seed material; sequences with different purposes are unrelated.
        opening: The rows that remain of the first epoch, which are shuffled again; the sequence then begins at `start`.
            Without it, the sequence begins at position 0.
    """

    def __init__(self, rows: int, seed: int, *purpose: int | str, opening: Opening | None = None) -> None:
        self.rows = rows
        self.seed = seed
        self._purpose = purpose
        self.opening = opening
        self._kept: tuple[int, int, Ints] | None = None

    @property
    def start(self) -> int:
        """The first position: 0, or the position where the remaining rows of the opening's epoch begin."""
        return 0 if self.opening is None else (self.opening.epoch + 1) * self.rows - self.opening.count

    def at(self, position: int, count: int) -> Ints:
        """Return the rows at `count` consecutive positions, int64 (count,); they may cross into the next epoch."""
        parts = []
        while count > 0:
            epoch, start = divmod(position, self.rows)
            length = min(count, self.rows - start)
            if count < _BLOCK:
                first = start - start % _BLOCK
                parts.append(self._block(epoch, first)[start - first : start - first + length])
                length = len(parts[-1])
            else:
                parts.append(self._permuted(epoch, np.arange(start, start + length, dtype=np.int64)))
            position = position + length
            count = count - length
        if not parts:
            return np.empty(0, dtype=np.int64)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def lookup(self, positions: Ints) -> Ints:
        """Return the rows at any positions of one epoch, int64 (n,)."""
        if not len(positions):
            return np.empty(0, dtype=np.int64)
        epoch = int(positions[0]) // self.rows
        return self._permuted(epoch, positions - epoch * self.rows)

    def _block(self, epoch: int, first: int) -> Ints:
        """Return the block of rows that begins at an aligned position.

        The last block is cached: the next request is mostly for the same block, and permuting a few rows takes about
        as long as permuting a whole block.
        """
        kept = self._kept  # read once: another thread may put another block there
        if kept is None or kept[:2] != (epoch, first):
            rows = self._permuted(epoch, np.arange(first, min(first + _BLOCK, self.rows), dtype=np.int64))
            rows.setflags(write=False)
            self._kept = kept = (epoch, first, rows)
        return kept[2]

    def _permuted(self, epoch: int, index: Ints) -> Ints:
        """Return the rows at some positions within an epoch."""
        opening = self.opening
        if opening is None or epoch != opening.epoch:
            return permute(index, self.rows, derive_seed(self.seed, "rows", *self._purpose, epoch))
        # A block may begin before the remaining rows; those positions are never requested.
        items = index - (self.rows - opening.count)
        rows = np.full(len(items), -1, dtype=np.int64)
        left = items >= 0
        key = derive_seed(self.seed, "rest", *self._purpose, epoch, opening.count)
        rows[left] = opening.rows(permute(items[left], opening.count, key))
        return rows

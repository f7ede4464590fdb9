"""The continuation of an epoch where a segment begins: which rows are left, and where they are among the new rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints
from headway.core.errors import ConfigError
from headway.data.feeding.order import RowOrder
from headway.data.feeding.plan import MixedPlan, PlainPlan, RowPlan

if TYPE_CHECKING:
    from headway.config.sections.segments import Segment

#: Name of the flag that starts a new epoch on purpose.
START_EPOCH = "--start-epoch"

# Limit on the rows to examine one by one when a run without weights gets weights: each takes 8 bytes of memory.
_MAX_EXAMINED_ROWS = 100_000_000
_CHUNK = 2**20


@dataclass(frozen=True)
class Leftover:
    """The rows that a sequence has left in the current epoch."""

    epoch: int
    count: int
    """Rows left, at least 1."""
    whole: bool
    """No row of the epoch was used."""
    locate: Callable[[Ints], tuple[NDArray[np.intp], Ints]]
    """Maps indices of remaining rows, from 0 on, to sources and rows within them, as the earlier plan numbers them;
    (n,)."""


class RowMap:
    """A map from the rows of a segment to the rows of the next one that hold their text.

    Args:
        before: Rows of each part of the earlier segment's data, by its sources in order.
        after: Rows of each part of the new segment's data, by its sources; its first parts are the earlier ones.
        cut: Number of rows of the new segment into which an earlier row is cut.
    """

    def __init__(self, before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]], cut: int) -> None:
        self.cut = cut
        self.names = tuple(after)
        self._numbers = np.array([self.names.index(name) for name in before], dtype=np.intp)
        self._before = [np.array([*accumulate(parts, initial=0)], dtype=np.int64) for parts in before.values()]
        self._after = {name: [*accumulate(parts, initial=0)] for name, parts in after.items()}
        self._starts = [np.array(self._after[name][: len(parts)], dtype=np.int64) for name, parts in before.items()]
        self.fresh = list(self._fresh(before, after))

    def _fresh(
        self, before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the rows that hold no text of an earlier row: source, first row, and count."""
        for number, (name, parts) in enumerate(after.items()):
            known = before.get(name, ())
            for part, rows in enumerate(parts):
                old = known[part] * self.cut if part < len(known) else 0
                if rows > old:
                    yield number, self._after[name][part] + old, rows - old

    def __call__(self, found: tuple[NDArray[np.intp], Ints], piece: Ints) -> tuple[NDArray[np.intp], Ints]:
        """Return the sources and rows of the new segment.

        Args:
            found: Numbers of sources in the earlier segment, and rows within them, (n,).
            piece: Index among the `cut` rows that each earlier row becomes, from 0 on, (n,).
        """
        sources, rows = found
        result = np.empty_like(rows)
        for source in np.unique(sources).tolist():
            places = sources == source
            starts = self._before[source]
            part = np.searchsorted(starts, rows[places], side="right") - 1
            result[places] = self._starts[source][part] + (rows[places] - starts[part]) * self.cut + piece[places]
        return self._numbers[sources], result

    def carried(self, source: int, seen: Bools) -> tuple[int, Bools]:
        """Map a source's seen rows to the new segment: its number there, and a mask of its rows there, (rows,)."""
        number = int(self._numbers[source])
        result = np.zeros(self._after[self.names[number]][-1], dtype=np.bool_)
        rows = np.flatnonzero(seen).astype(np.int64)
        sources = np.full(len(rows), source, dtype=np.intp)
        for piece in range(self.cut):
            result[self((sources, rows), np.full(len(rows), piece, dtype=np.int64))[1]] = True
        return number, result


class Remainder:
    """The rows that remain of an epoch when a segment begins (`headway.data.feeding.order.Opening`).

    Args:
        epoch: Number of the epoch in the new sequence.
        runs: The remaining rows of earlier sequences.
        row_map: The map from earlier rows to new ones.
        fresh: Rows of the new segment that hold no text of an earlier one: source, first row, and count.
        numbered: Maps sources and rows within them to row numbers in the new sequence.
    """

    def __init__(
        self,
        epoch: int,
        runs: Sequence[Leftover],
        row_map: RowMap,
        fresh: Sequence[tuple[int, int, int]],
        numbered: Callable[[NDArray[np.intp], Ints], Ints],
    ) -> None:
        self.epoch = epoch
        self._runs = runs
        self._map = row_map
        self._fresh = fresh
        self._numbered = numbered
        sizes = [*(run.count * row_map.cut for run in runs), *(count for _, _, count in fresh)]
        self._starts = np.array([*accumulate(sizes, initial=0)], dtype=np.int64)
        self.count = int(self._starts[-1])

    def rows(self, items: Ints) -> Ints:
        """Return the row numbers of some remaining rows, int64 (n,)."""
        result = np.empty(len(items), dtype=np.int64)
        groups = np.searchsorted(self._starts, items, side="right") - 1
        for group in np.unique(groups).tolist():
            places = groups == group
            inside = items[places] - self._starts[group]
            if group < len(self._runs):
                old = inside // self._map.cut
                piece = inside % self._map.cut
                sources, rows = self._map(self._runs[group].locate(old), piece)
            else:
                source, first, _ = self._fresh[group - len(self._runs)]
                sources = np.full(len(inside), source, dtype=np.intp)
                rows = first + inside
            result[places] = self._numbered(sources, rows)
        return result


def map_rows(earlier: Segment, segment: Segment, length_before: int, length: int) -> RowMap:
    """Make the map from the rows of a segment to those of the next one.

    Raises:
        ConfigError: The used rows of the epoch cannot be identified among the rows of the new segment.
    """
    where = f"step {segment.first_step:,} of the run"
    if earlier.packing != segment.packing or (length != length_before and segment.packing != "concat"):
        raise ConfigError(
            f"rows packed by {earlier.packing} to {length_before:,} tokens cannot be found among rows packed by"
            f" {segment.packing} to {length:,}, so it is unknown which rows of the epoch were used",
            where=f"data.packing, train.sequence_length: {where}",
            fix=f"{START_EPOCH} starts a new epoch of all data",
        )
    if length_before % length:
        divisors = [n for n in range(length_before, 0, -1) if length_before % n == 0 and n <= length]
        raise ConfigError(
            f"a row of {length:,} tokens holds parts of several rows of {length_before:,}, of which some were used in"
            " this epoch and others were not",
            where=f"train.sequence_length: {where}",
            fix=f"{START_EPOCH} starts a new epoch of all data; or choose a length that divides {length_before}, for"
            f" example train.sequence_length={divisors[0]}",
        )
    before = {name: of.get(length_before, []) for name, of in earlier.rows.items()}
    after = {name: of.get(length, []) for name, of in segment.rows.items()}
    if lost := [name for name, parts in before.items() if len(after.get(name, ())) < len(parts)]:
        raise ConfigError(
            f"the data no longer has all that the run has used of {', '.join(lost)}",
            where=where,
            fix=f"restore it; or {START_EPOCH} starts a new epoch of all data",
        )
    return RowMap(before, after, length_before // length)


class Continuation:
    """The continuation of sequences from one plan to the next.

    Args:
        before: The plan of the segment before.
        step: The first step of the new segment.
        counts: Rows of the new segment's sources.
        row_map: The map from earlier rows to new ones; None starts a new epoch.
        seed: Seed of the new segment.
    """

    def __init__(self, before: RowPlan, step: int, counts: Sequence[int], row_map: RowMap | None, seed: int) -> None:
        self._before = before
        self._step = step
        self._counts = list(counts)
        self._map = row_map
        self._seed = seed
        self.phase = 0
        if isinstance(self._before, MixedPlan):
            self.phase = self._before.mixture.segment_at(step - 1).phase.number

    def epochs_before(self, names: Sequence[str]) -> list[Fraction]:
        """Return the epochs of each source in the phases that are over."""
        if not isinstance(self._before, MixedPlan):
            return [Fraction(0)] * len(names)
        known = dict(
            zip(self._before.sources, self._before.mixture.epochs_of_phases_before(self._step - 1), strict=True)
        )
        return [known.get(name, Fraction(0)) for name in names]

    def order_of_all(self, plain: PlainPlan) -> tuple[RowOrder | None, int]:
        """Return the sequence of all rows of a plain plan, or None for the plan's own, and the position in it."""
        total = sum(self._counts)
        before = self._before
        if self._map is None:
            return None, (max(epoch for epoch, _, _, _ in self._sequences()) + 1) * total
        if isinstance(before, PlainPlan):
            runs = [_leftover_of_all(before, self._step)]
            same = before.sources == plain.sources and before.epoch_rows(0) == self._counts
            if same and self._map.cut == 1 and before.order.seed == self._seed:
                return before.order, before.position(self._step)
        else:
            runs = [_leftover_of_one(*sequence, source) for source, sequence in self._by_number()]
        epoch = max(run.epoch for run in runs)
        if all(run.whole for run in runs):
            return None, epoch * total
        rest = Remainder(epoch, runs, self._map, self._map.fresh, plain.numbered)
        order = RowOrder(total, self._seed, opening=rest)
        return order, order.start

    def orders_by_source(self, names: Sequence[str]) -> tuple[list[RowOrder | None], list[int]]:
        """Return the sequence of each source of a mixture, or None for the plan's own, and the position in it."""
        before = self._before
        if self._map is None:
            if isinstance(before, MixedPlan):
                known = {before.sources[number]: sequence[0] for number, sequence in self._by_number()}
            else:
                known = dict.fromkeys(before.sources, next(self._sequences())[0])
            pairs = zip(names, self._counts, strict=True)
            return [None] * len(names), [(known[name] + 1) * count if name in known else 0 for name, count in pairs]
        left: dict[str, tuple[Leftover, RowOrder | None, int]] = {}
        if isinstance(before, MixedPlan):
            for number, sequence in self._by_number():
                _, order, position, _ = sequence
                left[before.sources[number]] = _leftover_of_one(*sequence, number), order, position
        else:
            assert isinstance(before, PlainPlan), "there are two kinds"
            for number, leftover in enumerate(_leftovers_by_source(before, self._step)):
                if leftover is not None:
                    left[before.sources[number]] = leftover, None, 0
        orders: list[RowOrder | None] = []
        positions: list[int] = []
        for number, (name, count) in enumerate(zip(names, self._counts, strict=True)):
            own, place = self._of_source(name, number, count, left.get(name))
            orders.append(own)
            positions.append(place)
        return orders, positions

    def _of_source(
        self, name: str, number: int, count: int, left: tuple[Leftover, RowOrder | None, int] | None
    ) -> tuple[RowOrder | None, int]:
        if not count:
            return None, 0
        assert self._map is not None, "otherwise a new epoch begins"
        fresh = [entry for entry in self._map.fresh if entry[0] == number]
        runs: list[Leftover] = []
        if left is not None:
            leftover, order_before, position = left
            if order_before is not None and order_before.seed == self._seed and not fresh and self._map.cut == 1:
                return order_before, position
            if leftover.whole:
                return None, leftover.epoch * count
            epoch = leftover.epoch
            runs = [leftover]
        elif isinstance(self._before, PlainPlan) and name in self._before.sources:
            # All rows that the source had in this epoch are used: only added rows remain.
            epoch = self._before.position(self._step) // self._before.order.rows
            if not fresh:
                return None, (epoch + 1) * count
        else:
            return None, 0
        rest = Remainder(epoch, runs, self._map, fresh, lambda sources, rows: rows)  # numbered as in the source
        order = RowOrder(count, self._seed, name, self.phase, opening=rest)
        return order, order.start

    def _sequences(self) -> Iterator[tuple[int, RowOrder, int, int]]:
        """Yield epoch, order, position and rows of each sequence of the earlier plan."""
        before = self._before
        if isinstance(before, PlainPlan):
            position = before.position(self._step)
            yield position // before.order.rows, before.order, position, before.order.rows
        else:
            yield from (sequence for _, sequence in self._by_number())

    def _by_number(self) -> Iterator[tuple[int, tuple[int, RowOrder, int, int]]]:
        """Yield each sequence of an earlier mixture, with the number of its source."""
        before = self._before
        assert isinstance(before, MixedPlan), "a plain plan has one sequence"
        segment = before.mixture.segment_at(self._step - 1)
        for number, position in enumerate(before.mixture.used_after(self._step - 1)):
            rows = segment.phase.counts[number]
            if rows:
                yield number, (position // rows, before.order(segment, number), position, rows)


def _leftover_of_all(plan: PlainPlan, step: int) -> Leftover:
    position = plan.position(step)
    rows = plan.order.rows
    used = position % rows

    def locate(items: Ints) -> tuple[NDArray[np.intp], Ints]:
        return plan.located(plan.order.lookup(position + items))

    return Leftover(position // rows, rows - used, used == 0, locate)


def _leftover_of_one(epoch: int, order: RowOrder, position: int, rows: int, source: int) -> Leftover:
    used = position % rows

    def locate(items: Ints) -> tuple[NDArray[np.intp], Ints]:
        return np.full(len(items), source, dtype=np.intp), order.lookup(position + items)

    return Leftover(epoch, rows - used, used == 0, locate)


def _leftovers_by_source(plan: PlainPlan, step: int) -> list[Leftover | None]:
    """Collect the remaining rows of each source of a plain plan, row by row; None for a source without any.

    Raises:
        ConfigError: There are too many rows to keep in memory.
    """
    position = plan.position(step)
    rows = plan.order.rows
    used = position % rows
    if rows - used > _MAX_EXAMINED_ROWS:
        raise ConfigError(
            f"weights cannot be set in the middle of an epoch with {rows - used:,} rows left: only up to"
            f" {_MAX_EXAMINED_ROWS:,} rows can be sorted by their source",
            where=f"data.sources.*.weight, data.mixture: step {step:,} of the run",
            fix=f"{START_EPOCH} starts a new epoch of all data",
        )
    kept: list[list[Ints]] = [[] for _ in plan.sources]
    for start in range(position, position + rows - used, _CHUNK):
        stop = min(start + _CHUNK, position + rows - used)
        sources, numbers = plan.located(plan.order.lookup(np.arange(start, stop, dtype=np.int64)))
        for source, found in enumerate(kept):
            found.append(numbers[sources == source])
    return [
        _leftover_of_list(position // rows, source, np.concatenate(found), count)
        for source, (found, count) in enumerate(zip(kept, plan.epoch_rows(step), strict=True))
    ]


def _leftover_of_list(epoch: int, source: int, left: Ints, count: int) -> Leftover | None:
    if not len(left):
        return None

    def locate(items: Ints) -> tuple[NDArray[np.intp], Ints]:
        return np.full(len(items), source, dtype=np.intp), left[items]

    return Leftover(epoch, len(left), len(left) == count, locate)

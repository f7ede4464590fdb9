"""Counts of how often a plan used each row: by checking every row, or from the plan's own counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.data.feeding.plan import Picks, RowPlan
from headway.data.feeding.segmented import SegmentedPlan

#: Half-open ranges of steps.
Ranges = Sequence[tuple[int, int]]

# Rows checked at a time.
_TOGETHER = 2**16


@dataclass(frozen=True)
class EpochCount:
    """Counts of one epoch of a source, or of consecutive epochs with equal counts."""

    first_step: int
    """Step at which the source started over because the row length changed; usually 0."""
    source: str
    first_epoch: int
    last_epoch: int
    """The last epoch, inclusive."""
    rows: int
    """Rows of the source in an epoch."""
    used: int
    """Different rows used in each epoch; in the current epoch fewer than there are."""
    twice: int = 0
    """Uses of a row beyond the first, in each epoch."""
    skipped: int = 0
    """Rows missing from each epoch that is over."""
    left_out: int = 0
    """Rows skipped in each epoch by a decision in the ledger; they do not count as used."""
    unused: int = 0
    """Rows left in the epoch when another one was begun on purpose (`--start-epoch`)."""

    @property
    def sound(self) -> bool:
        """Whether no row was used twice or missed."""
        return not self.twice and not self.skipped


@dataclass(frozen=True)
class RowCount:
    """The result of a count."""

    by_range: list[list[int]]
    """Rows of each source, for each requested range of steps."""
    epochs: list[EpochCount]


def count_by_looking(
    plan: RowPlan, ranges: Sequence[tuple[int, int]], advance: Callable[[int], None] = lambda rows: None
) -> RowCount:
    """Count the rows of ranges of steps by checking every row.

    Args:
        plan: The plan.
        ranges: Half-open ranges of steps, which join from step 0 on.
        advance: Called with the number of rows checked since the last call.
    """
    by_range = [np.zeros(len(plan.sources), dtype=np.int64) for _ in ranges]
    epochs: list[EpochCount] = []
    books: list[_Book] = []
    end = ranges[-1][1] if ranges else 0
    for first, last in plan.stretches(0, end):
        books = _books_of(plan, first, books, epochs)
        for number, (start, stop) in enumerate(ranges):
            for picks in _picks(plan, max(first, start), min(last, stop)):
                by_range[number] += np.bincount(picks.sources, minlength=len(books))
                for source, book in enumerate(books):
                    of_source = picks.sources == source
                    book.add(picks.rows[of_source], picks.epochs[of_source])
                advance(len(picks))
    for book in books:
        epochs += book.closed()
    return RowCount([counts.tolist() for counts in by_range], merged(epochs))


def _books_of(plan: RowPlan, first: int, before: Sequence[_Book], epochs: list[EpochCount]) -> list[_Book]:
    """Make a book for each source of a stretch, and add the closed epochs of the books before to `epochs`."""
    pairs = zip(plan.sources, plan.epoch_rows(first), strict=True)
    books = [_Book(plan.begun(first), name, count) for name, count in pairs]
    if not (before and isinstance(plan, SegmentedPlan) and first in plan.firsts):
        for book in before:
            epochs += book.closed()
        return books
    border = plan.border(first)
    for source, (epoch, _) in border.after.items():
        books[source].begin(epoch)
    for source, epoch in border.before.items():
        before[source].go_to(epoch)
        if border.row_map is not None and source in border.after:
            row_map = border.row_map
            name = plan.sources[source]
            seen = row_map.carried(border.numbers[source], before[source].seen)
            assert row_map.names[seen[0]] == name, "rows are found again in their source"
            books[source].take(*border.after[source], seen[1])
            epochs += before[source].ended()
        else:
            epochs += before[source].closed(on_purpose=True)
    return books


def count_by_plan(plan: RowPlan, ranges: Sequence[tuple[int, int]]) -> RowCount:
    """Count the rows of ranges of steps from the plan's counts.

    That an epoch has each row once then follows from its order being a bijection.
    """
    epochs: list[EpochCount] = []
    for first, last in plan.stretches(0, ranges[-1][1] if ranges else 0):
        label = plan.begun(first)
        rows = plan.epoch_rows(first)
        for use in sorted(plan.by_epoch(first, last)):
            name = plan.sources[use.source]
            epochs.append(EpochCount(label, name, use.first, use.last, rows[use.source], use.rows))
    order = [*plan.sources]
    epochs.sort(key=lambda entry: (entry.first_step, order.index(entry.source)))
    return RowCount([plan.counts(first, last) for first, last in ranges], merged(epochs))


def without(plan: RowPlan, counted: RowCount, ranges: Sequence[tuple[int, int]], skipped_ranges: Ranges) -> RowCount:
    """Return a count in which the rows of skipped steps do not count as used.

    Args:
        plan: The plan.
        counted: The count of all steps in `ranges`.
        ranges: Half-open ranges of steps that were counted.
        skipped_ranges: Half-open ranges of steps whose rows are skipped by decision, without overlaps.
    """
    by_range = [list(counts) for counts in counted.by_range]
    epochs = list(counted.epochs)
    end = ranges[-1][1] if ranges else 0
    for stretch, last_of_stretch in plan.stretches(0, end):
        for start, stop in skipped_ranges:
            for picks in _picks(plan, max(start, stretch), min(stop, last_of_stretch)):
                for source, epoch in set(zip(picks.sources.tolist(), picks.epochs.tolist(), strict=True)):
                    rows = int(((picks.sources == source) & (picks.epochs == epoch)).sum())
                    begun = plan.begun(stretch)
                    name = plan.sources[source]
                    epochs = [part for e in epochs for part in _less(e, begun, name, epoch, rows)]
    for number, (first, last) in enumerate(ranges):
        for start, stop in skipped_ranges:
            start = max(start, first)
            stop = min(stop, last)
            if start < stop:
                counts = zip(by_range[number], plan.counts(start, stop), strict=True)
                by_range[number] = [used - out for used, out in counts]
    return RowCount(by_range, epochs)


def _less(entry: EpochCount, first_step: int, source: str, epoch: int, rows: int) -> Iterator[EpochCount]:
    """Yield an entry, split so that one of its epochs, if it is among them, used fewer rows."""
    if (entry.first_step, entry.source) != (first_step, source) or not entry.first_epoch <= epoch <= entry.last_epoch:
        yield entry
        return
    if entry.first_epoch < epoch:
        yield replace(entry, last_epoch=epoch - 1)
    used = entry.used - rows
    left_out = entry.left_out + rows
    yield replace(entry, first_epoch=epoch, last_epoch=epoch, used=used, left_out=left_out)
    if epoch < entry.last_epoch:
        yield replace(entry, first_epoch=epoch + 1)


def merged(epochs: list[EpochCount]) -> list[EpochCount]:
    """Merge consecutive epochs of a source with equal counts into one entry."""
    result: list[EpochCount] = []
    for epoch in epochs:
        before = result[-1] if result else None
        if before and _place(before) == _place(epoch) and before.last_epoch == epoch.first_epoch == epoch.last_epoch:
            # An epoch that continues across the border of a segment, with more rows if data was added.
            result[-1] = replace(before, rows=max(before.rows, epoch.rows), used=before.used + epoch.used)
        elif before and before.last_epoch + 1 == epoch.first_epoch and _counts(before) == _counts(epoch):
            result[-1] = EpochCount(
                *(epoch.first_step, epoch.source, before.first_epoch, epoch.last_epoch, epoch.rows),
                *(epoch.used, epoch.twice, epoch.skipped, epoch.left_out, epoch.unused),
            )
        else:
            result.append(epoch)
    return result


def _place(epoch: EpochCount) -> tuple[int, str]:
    return epoch.first_step, epoch.source


def _counts(epoch: EpochCount) -> tuple[object, ...]:
    return *_place(epoch), epoch.rows, epoch.used, epoch.twice, epoch.skipped, epoch.unused


def _picks(plan: RowPlan, first: int, last: int) -> Iterator[Picks]:
    """Yield all rows of a range of steps in which rows have one length."""
    while first < last:
        end = min(last, first + max(1, _TOGETHER // plan.step_rows(first)))
        parts = [plan.picks(step, 0, plan.step_rows(step)) for step in range(first, end)]
        first = end
        yield Picks(
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.epochs for part in parts]),
        )


class _Book:
    """The rows of one source that the current epoch has used (`seen`, (rows,)), and the counts of closed epochs."""

    def __init__(self, first_step: int, source: str, rows: int) -> None:
        self._first_step = first_step
        self._source = source
        self._rows = rows
        self._epoch = 0
        self._uses = 0
        self.seen = np.zeros(rows, dtype=np.bool_)
        self._closed: list[EpochCount] = []

    def add(self, rows: NDArray[np.int64], epochs: NDArray[np.int64]) -> None:
        """Add rows in the order of their use."""
        if not len(rows):
            return
        one = epochs.min() == epochs.max()  # the usual case, and much faster than `np.unique`
        for epoch in [int(epochs[0])] if one else np.unique(epochs).tolist():
            self.go_to(epoch)
            of_epoch = rows if one else rows[epochs == epoch]
            self.seen[of_epoch] = True
            self._uses += len(of_epoch)

    def go_to(self, epoch: int) -> None:
        """Close all epochs before a given one."""
        while self._epoch < epoch:
            self._close(over=True)

    def begin(self, epoch: int) -> None:
        """Begin with an epoch of which no row was used."""
        self._epoch = epoch

    def take(self, epoch: int, is_begun: bool, seen: NDArray[np.bool_]) -> None:
        """Begin in the middle of the sequence, with rows that the current epoch has used.

        Args:
            epoch: The current epoch.
            is_begun: Whether some of its rows were used before; if not, `seen` is the whole epoch before it.
            seen: Whether each row was used, (rows,).
        """
        self._epoch = epoch if is_begun or not seen.any() else epoch - 1
        self.seen, self._uses = seen, int(seen.sum())
        self.go_to(epoch)

    def ended(self) -> list[EpochCount]:
        """Return the epochs that are over."""
        return self._closed

    def closed(self, on_purpose: bool = False) -> list[EpochCount]:
        """Close the current epoch and return all epochs.

        Args:
            on_purpose: Whether another epoch was begun in its place.
        """
        if self._uses:
            self._close(over=False)
            if on_purpose:
                self._closed[-1] = replace(self._closed[-1], unused=self._rows - self._closed[-1].used)
        return self._closed

    def _close(self, over: bool) -> None:
        used = int(self.seen.sum())
        skipped = self._rows - used if over else 0
        self._closed.append(
            EpochCount(
                *(self._first_step, self._source, self._epoch, self._epoch, self._rows),
                *(used, self._uses - used, skipped),
            )
        )
        self._epoch = self._epoch + 1
        self._uses = 0
        self.seen = np.zeros(self._rows, dtype=np.bool_)

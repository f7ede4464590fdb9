"""The rows of a step: a pure function of the step, whichever process computes it and wherever it starts.

There are two kinds of plan. The plain plan shuffles all rows of all sources together, so each is used once per epoch.
In a mixture every source has its own endless sequence of shuffled epochs, and shares decide which source comes next. A
source's sequence follows from the seed and its name, so other sources and other shares do not reshuffle it. A run that
was changed midway has one plan after another (`headway.data.feeding.segmented`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Ints
from headway.data.feeding.mixture import Mixture, Segment
from headway.data.feeding.order import RowOrder
from headway.data.feeding.source_order import sources_of

if TYPE_CHECKING:
    from headway.config import Batches

# Positions that `PlainPlan.counts` computes at a time: 8 MiB of them.
_CHUNK = 2**20

# Rows of a mixture that are located at a time.
_BLOCK = 8192


@dataclass(frozen=True)
class Picks:
    """Some rows, in the order in which a step holds them: arrays of one length n."""

    sources: NDArray[np.intp]
    """Numbers of sources, (n,)."""
    rows: Ints
    """Numbers of rows within their source, (n,)."""
    epochs: Ints
    """How many times the row was used before (in a mixture: since the row length last changed), (n,)."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Picks:
        """Return some of the rows."""
        return Picks(self.sources[places], self.rows[places], self.epochs[places])


class RowPlan(Protocol):
    """The rows of every step."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        ...

    def sequence_length(self, step: int) -> int:
        """Return the tokens per row in a step."""
        ...

    def step_rows(self, step: int) -> int:
        """Return the number of rows in a step."""
        ...

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Return rows `start` to `stop` (exclusive) of a step."""
        ...

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in steps `first` to `last` (exclusive)."""
        ...

    def epochs(self, step: int) -> list[float]:
        """Return the epochs of each source by the end of a step, since the row length last changed."""
        ...

    def epoch_rows(self, step: int) -> list[int]:
        """Count the rows of each source in an epoch, at the row length of a step."""
        ...

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut steps `first` to `last` (exclusive) where the row length or the plan changes."""
        ...

    def begun(self, step: int) -> int:
        """Return the step at which the epoch count of `step` began: where the row length last changed."""
        ...

    def by_epoch(self, first: int, last: int) -> Iterator[EpochUse]:
        """Yield the use of each epoch in steps `first` to `last` (exclusive), whose rows have one length."""
        ...

    def describe(self, last: int) -> dict[str, Any]:
        """Describe, as plain JSON, all but the store that determines the rows of the steps before `last`."""
        ...


class EpochUse(NamedTuple):
    """Consecutive epochs of a source that each gave an equal number of rows."""

    source: int
    first: int
    last: int
    """The last of the epochs."""
    rows: int
    """Rows that each epoch gave."""


def epochs_between(position: int, end: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut positions `position` to `end` (exclusive) of a sequence where an epoch ends; whole epochs stay together.

    Yields:
        The first epoch, the last epoch, the first position, and the position after the last.
    """
    while position < end:
        epoch, start = divmod(position, rows)
        whole = (end - position) // rows if start == 0 else 0
        stop = position + whole * rows if whole else min(end, (epoch + 1) * rows)
        yield epoch, epoch + max(whole, 1) - 1, position, stop
        position = stop


class PlainPlan:
    """All rows of all sources in one shuffled sequence of epochs.

    Args:
        sources: Names of the sources.
        counts: Rows of each source, at least 1 in total. Rows are numbered over the sources in order.
        seed: Seed of the run.
        batches: Rows of every step.
        sequence_length: Tokens per row; 1 for rows that are not tokens.
        order: The sequence, if it continues an earlier one of the run.
        start: The first step and its position in the sequence, if the plan begins in the middle of the run.
    """

    def __init__(
        self,
        sources: Sequence[str],
        counts: Sequence[int],
        seed: int,
        batches: Batches,
        sequence_length: int = 1,
        *,
        order: RowOrder | None = None,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        self.sources = tuple(sources)
        self._counts = list(counts)
        self._starts = np.array([*accumulate(counts, initial=0)], dtype=np.int64)
        self.order = order or RowOrder(sum(counts), seed)
        self._batches = batches
        self._length = sequence_length
        self._start = start

    def position(self, step: int) -> int:
        """Return where a step begins in the sequence of all rows."""
        first, position = self._start
        return position + self._batches.rows_before(step) - self._batches.rows_before(first)

    def sequence_length(self, step: int) -> int:
        """Return the tokens per row in a step."""
        return self._length

    def step_rows(self, step: int) -> int:
        """Return the number of rows in a step."""
        return self._batches.rows(step)

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Return rows `start` to `stop` (exclusive) of a step."""
        position = self.position(step) + start
        count = stop - start
        sources, rows = self.located(self.order.at(position, count))
        epochs = np.arange(position, position + count, dtype=np.int64) // self.order.rows
        return Picks(sources, rows, epochs)

    def located(self, rows: Ints) -> tuple[NDArray[np.intp], Ints]:
        """Return the sources, and numbers within them, of rows that are numbered over all sources, (n,)."""
        sources = self._source_of(rows)
        return sources, rows - self._starts[sources]

    def numbered(self, sources: NDArray[np.intp], rows: Ints) -> Ints:
        """Return the numbers of rows over all sources, from their sources and numbers within them, (n,)."""
        return np.asarray(self._starts[sources] + rows, dtype=np.int64)

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in steps `first` to `last` (exclusive); incomplete epochs row by row."""
        counts = [0] * len(self.sources)
        for use in self.by_epoch(first, last):
            counts[use.source] += use.rows * (use.last - use.first + 1)
        return counts

    def by_epoch(self, first: int, last: int) -> Iterator[EpochUse]:
        """Yield the use of each epoch in some steps; incomplete epochs are counted row by row."""
        stretch = epochs_between(self.position(first), self.position(last), self.order.rows)
        for first_epoch, last_epoch, position, end in stretch:
            # A whole epoch has every row once: there is nothing to compute.
            whole = (end - position) // (last_epoch - first_epoch + 1) == self.order.rows
            counts = self._counts if whole else self._counted(position, end)
            for source, rows in enumerate(counts):
                if rows:
                    yield EpochUse(source, first_epoch, last_epoch, rows)

    def _counted(self, position: int, end: int) -> list[int]:
        """Count the rows of each source at some positions of one epoch."""
        if len(self.sources) == 1:
            return [end - position]
        counts = np.zeros(len(self.sources), dtype=np.int64)
        for start in range(position, end, _CHUNK):
            rows = self.order.at(start, min(_CHUNK, end - start))
            counts += np.bincount(self._source_of(rows), minlength=len(counts))
        return [int(count) for count in counts]

    def epochs(self, step: int) -> list[float]:
        """Return the epochs by the end of a step, which are equal for all sources."""
        return [self.position(step + 1) / self.order.rows] * len(self.sources)

    def epoch_rows(self, step: int) -> list[int]:
        """Count the rows of each source in an epoch."""
        return list(self._counts)

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield all steps at once, since the row length never changes."""
        if first < last:
            yield first, last

    def begun(self, step: int) -> int:
        """Return the step at which the plan begins."""
        return self._start[0]

    def describe(self, last: int) -> dict[str, Any]:
        """Describe all that determines the rows."""
        rows = dict(zip(self.sources, self._counts, strict=True))
        parts = [part for part in self._batches.parts if part[0] < max(1, last)]
        step_rows = parts[0][1] if len(parts) == 1 else list(map(list, parts))
        return {"seed": self.order.seed, "rows": rows, "step_rows": step_rows, "length": self._length}

    def _source_of(self, rows: Ints) -> NDArray[np.intp]:
        if len(self.sources) == 1:
            return np.zeros(len(rows), dtype=np.intp)
        return np.searchsorted(self._starts, rows, side="right") - 1


class MixedPlan:
    """Rows in the shares of a mixture.

    Args:
        mixture: The shares.
        seed: Seed of the run.
        orders: The sequences of the first phase, where they continue earlier ones of the run.
    """

    def __init__(self, mixture: Mixture, seed: int, orders: Sequence[RowOrder | None] = ()) -> None:
        self.mixture = mixture
        self._seed = seed
        phase = mixture.segments[0].phase.number
        self._orders = {(phase, number): order for number, order in enumerate(orders) if order is not None}
        self._kept: tuple[int, int, Picks] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        return self.mixture.sources

    def sequence_length(self, step: int) -> int:
        """Return the tokens per row in a step."""
        return self.mixture.segment_at(step).phase.sequence_length

    def step_rows(self, step: int) -> int:
        """Return the number of rows in a step."""
        return self.mixture.segment_at(step).step_rows

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Return rows `start` to `stop` (exclusive) of a step."""
        kept = self._kept  # read once: another thread may put other steps there
        if kept is None or not kept[0] <= step < kept[1]:
            self._kept = kept = self._block(step)
        first, last, picks = kept
        before = (step - first) * (len(picks) // (last - first))
        return picks[before + start : before + stop]

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in steps `first` to `last` (exclusive)."""
        return self.mixture.counts(first, last)

    def epochs(self, step: int) -> list[float]:
        """Return the epochs of each source by the end of a step, since the row length last changed."""
        before = self.mixture.used(step)
        more = self.counts(step, step + 1)
        rows = zip(before, more, self.epoch_rows(step), strict=True)
        return [(used + taken) / all_ if all_ else 0.0 for used, taken, all_ in rows]

    def epoch_rows(self, step: int) -> list[int]:
        """Count the rows of each source in an epoch, at the row length of a step."""
        return list(self.mixture.segment_at(step).phase.counts)

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut steps `first` to `last` (exclusive) where the row length changes."""
        cuts = [first, *(start for start in self._phase_starts() if first < start < last), last]
        return ((a, b) for a, b in pairwise(cuts) if a < b)

    def begun(self, step: int) -> int:
        """Return the first step of the phase that contains a step."""
        return max(start for start in self._phase_starts() if start <= step)

    def by_epoch(self, first: int, last: int) -> Iterator[EpochUse]:
        """Yield the use of each epoch of each source in some steps."""
        used = self.mixture.used(first)
        counts = self.mixture.counts(first, last)
        for source, (position, more, rows) in enumerate(zip(used, counts, self.epoch_rows(first), strict=True)):
            if more:
                for first_epoch, last_epoch, start, end in epochs_between(position, position + more, rows):
                    yield EpochUse(source, first_epoch, last_epoch, (end - start) // (last_epoch - first_epoch + 1))

    def _phase_starts(self) -> list[int]:
        numbers = [segment.phase.number for segment in self.mixture.segments]
        before = [None, *numbers[:-1]]
        return [
            segment.first_step
            for segment, number, last in zip(self.mixture.segments, numbers, before, strict=True)
            if number != last
        ]

    def describe(self, last: int) -> dict[str, Any]:
        """Describe all that determines the rows of the steps before `last`."""
        segments = [
            {
                "first_step": segment.first_step,
                "bounds": list(map(str, segment.bounds)),  # as text: not every JSON reader keeps such integers exactly
                "used": list(segment.used),
                "rows": dict(zip(self.sources, segment.phase.counts, strict=True)),
                "step_rows": segment.step_rows,
                "length": segment.phase.sequence_length,
                "phase": segment.phase.number,
            }
            for segment in self.mixture.segments
            if segment.first_step < last
        ]
        return {"seed": self._seed, "segments": segments}

    def _block(self, step: int) -> tuple[int, int, Picks]:
        """Compute the rows of the block of steps around one, within its segment: (first, last, rows)."""
        segment = self.mixture.segment_at(step)
        rows = segment.step_rows
        steps = max(1, _BLOCK // rows)
        aligned = step - step % steps
        first = max(aligned, segment.first_step)
        last = min(aligned + steps, segment.last_step)
        sources = sources_of(segment.bounds, first, last, rows, self._seed).ravel()
        numbers = np.empty(len(sources), dtype=np.int64)
        epochs = np.empty(len(sources), dtype=np.int64)
        for source, used in enumerate(self.mixture.used(first)):
            places = np.flatnonzero(sources == source)
            if len(places):
                order = self.order(segment, source)
                numbers[places] = order.at(used, len(places))
                epochs[places] = np.arange(used, used + len(places), dtype=np.int64) // order.rows
        return first, last, Picks(sources, numbers, epochs)

    def order(self, segment: Segment, source: int) -> RowOrder:
        """Return the sequence of a source's rows in the phase of a segment."""
        key = (segment.phase.number, source)
        if key not in self._orders:
            rows = segment.phase.counts[source]
            self._orders[key] = RowOrder(rows, self._seed, self.sources[source], segment.phase.number)
        return self._orders[key]

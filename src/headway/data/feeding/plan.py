"""Which rows a step holds: a pure function of the step, whatever computes it and wherever one begins.

There are two plans. In the plain one all rows of all sources are shuffled together, so each is used once per epoch. In
a mixture every source goes through its own endless sequence of shuffled epochs, and shares say which of them is next;
a source's sequence follows from the seed and its name, so other sources and other shares do not reshuffle it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.feeding.lattice import sources_of
from headway.data.feeding.mixture import Mixture, Segment, is_mixed, plan_mixture
from headway.data.feeding.order import RowOrder

if TYPE_CHECKING:
    from headway.config import Batches, Config
    from headway.data.feeding.split import SplitRows

# Positions that `PlainPlan.counts` computes at a time: 8 MiB of them.
_CHUNK = 2**20

# Rows whose places in a mixture are worked out at a time.
_BLOCK = 8192


@dataclass(frozen=True)
class Picks:
    """Some rows in the order in which a step holds them: arrays of one length n."""

    sources: NDArray[np.intp]
    """Numbers of sources, (n,)."""
    rows: NDArray[np.int64]
    """Numbers of rows within their source, (n,)."""
    epochs: NDArray[np.int64]
    """How many times the row was used before (in a mixture: since the row length last changed), (n,)."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Picks:
        """Some of them."""
        return Picks(self.sources[places], self.rows[places], self.epochs[places])


class RowPlan(Protocol):
    """What every step is made of."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        ...

    def sequence_length(self, step: int) -> int:
        """Tokens per row in a step."""
        ...

    def step_rows(self, step: int) -> int:
        """Rows of a step."""
        ...

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Rows `start` to `stop` (exclusive) of a step."""
        ...

    def counts(self, first: int, last: int) -> list[int]:
        """Rows of each source in steps `first` to `last` (exclusive)."""
        ...

    def epochs(self, step: int) -> list[float]:
        """How many times each source was gone through by the end of a step, since the row length last changed."""
        ...

    def epoch_rows(self, step: int) -> list[int]:
        """Rows that each source has in an epoch, of the length of a step."""
        ...

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Steps `first` to `last` (exclusive), cut where the row length changes."""
        ...

    def describe(self, last: int) -> dict[str, Any]:
        """Plain JSON of all that the rows of the steps before `last` follow from, but the store."""
        ...


def plan_of(config: Config, rows: SplitRows) -> RowPlan:
    """The plan of a resolved config for the rows of a store.

    Raises:
        ConfigError: sources are used up before the last step, or the config and the store have other sources.
        DataError: a source that has a weight has no row.
    """
    if not is_mixed(config.data):
        length = config.train.sequence_length
        return PlainPlan(rows.sources, rows.counts(length), config.seed, config.train.batches, length)
    return MixedPlan(plan_mixture(config, rows.sources, rows.counts, rows.where), config.seed)


class PlainPlan:
    """All rows of all sources in one shuffled sequence of epochs.

    Args:
        sources: Names of the sources.
        counts: Rows of each, in all at least 1. Rows are numbered over the sources in order.
        seed: Seed of the run.
        batches: Rows of every step.
        sequence_length: Tokens per row; 1 for rows that are not tokens.
    """

    def __init__(
        self, sources: Sequence[str], counts: Sequence[int], seed: int, batches: Batches, sequence_length: int = 1
    ) -> None:
        self.sources, self._counts = tuple(sources), list(counts)
        self._starts = np.array([*accumulate(counts, initial=0)], dtype=np.int64)
        self._order = RowOrder(sum(counts), seed)
        self._batches, self._length = batches, sequence_length

    def sequence_length(self, step: int) -> int:
        """Tokens per row in a step."""
        return self._length

    def step_rows(self, step: int) -> int:
        """Rows of a step."""
        return self._batches.rows(step)

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Rows `start` to `stop` (exclusive) of a step."""
        position, count = self._batches.rows_before(step) + start, stop - start
        rows = self._order.at(position, count)
        sources = self._source_of(rows)
        epochs = np.arange(position, position + count, dtype=np.int64) // self._order.rows
        return Picks(sources, rows - self._starts[sources], epochs)

    def counts(self, first: int, last: int) -> list[int]:
        """Rows of each source in steps `first` to `last` (exclusive); parts of epochs are looked at row by row."""
        position, end = self._batches.rows_before(first), self._batches.rows_before(last)
        if len(self.sources) == 1:
            return [end - position]
        counts, total = np.zeros(len(self.sources), dtype=np.int64), self._order.rows
        while position < end:
            left_in_epoch = total - position % total
            if left_in_epoch == total and end - position >= total:
                # Whole epochs have every row once: nothing to compute.
                epochs = (end - position) // total
                counts += epochs * np.array(self._counts, dtype=np.int64)
                position += epochs * total
                continue
            count = min(left_in_epoch, end - position, _CHUNK)
            counts += np.bincount(self._source_of(self._order.at(position, count)), minlength=len(counts))
            position += count
        return [int(count) for count in counts]

    def epochs(self, step: int) -> list[float]:
        """How many times all rows were gone through by the end of a step: the same for each source."""
        return [self._batches.rows_before(step + 1) / self._order.rows] * len(self.sources)

    def epoch_rows(self, step: int) -> list[int]:
        """Rows that each source has in an epoch."""
        return list(self._counts)

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """The row length never changes."""
        if first < last:
            yield first, last

    def describe(self, last: int) -> dict[str, Any]:
        """All that the rows follow from."""
        rows = dict(zip(self.sources, self._counts, strict=True))
        parts = [part for part in self._batches.parts if part[0] < max(1, last)]
        step_rows = parts[0][1] if len(parts) == 1 else list(map(list, parts))
        return {"seed": self._order.seed, "rows": rows, "step_rows": step_rows, "length": self._length}

    def _source_of(self, rows: NDArray[np.int64]) -> NDArray[np.intp]:
        if len(self.sources) == 1:
            return np.zeros(len(rows), dtype=np.intp)
        return np.searchsorted(self._starts, rows, side="right") - 1


class MixedPlan:
    """Rows in the shares of a mixture.

    Args:
        mixture: The shares.
        seed: Seed of the run.
    """

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self.mixture, self._seed = mixture, seed
        self._orders: dict[tuple[int, int], RowOrder] = {}
        self._kept: tuple[int, int, Picks] | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        return self.mixture.sources

    def sequence_length(self, step: int) -> int:
        """Tokens per row in a step."""
        return self.mixture.segment_at(step).phase.sequence_length

    def step_rows(self, step: int) -> int:
        """Rows of a step."""
        return self.mixture.segment_at(step).step_rows

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Rows `start` to `stop` (exclusive) of a step."""
        kept = self._kept  # read once: another thread may put other steps there
        if kept is None or not kept[0] <= step < kept[1]:
            self._kept = kept = self._block(step)
        first, last, picks = kept
        before = (step - first) * (len(picks) // (last - first))
        return picks[before + start : before + stop]

    def counts(self, first: int, last: int) -> list[int]:
        """Rows of each source in steps `first` to `last` (exclusive)."""
        return self.mixture.counts(first, last)

    def epochs(self, step: int) -> list[float]:
        """How many times each source was gone through by the end of a step, since the row length last changed."""
        before, more = self.mixture.used(step), self.counts(step, step + 1)
        rows = zip(before, more, self.epoch_rows(step), strict=True)
        return [(used + taken) / all_ if all_ else 0.0 for used, taken, all_ in rows]

    def epoch_rows(self, step: int) -> list[int]:
        """Rows that each source has in an epoch, of the length of a step."""
        return list(self.mixture.segment_at(step).phase.counts)

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Steps `first` to `last` (exclusive), cut where the row length changes."""
        starts = [s.first_step for s in self.mixture.segments if not any(s.used)]
        cuts = [first, *(start for start in starts if first < start < last), last]
        return ((a, b) for a, b in pairwise(cuts) if a < b)

    def describe(self, last: int) -> dict[str, Any]:
        """All that the rows of the steps before `last` follow from."""
        segments = [
            {
                "first_step": segment.first_step,
                "bounds": list(map(str, segment.bounds)),  # beyond what every reader of JSON keeps exactly
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
        """The steps around one, as far as the segment goes: (first, last, their rows)."""
        segment = self.mixture.segment_at(step)
        rows = segment.step_rows
        steps = max(1, _BLOCK // rows)
        aligned = step - step % steps
        first, last = max(aligned, segment.first_step), min(aligned + steps, segment.last_step)
        sources = sources_of(segment.bounds, first, last, rows, self._seed).ravel()
        numbers, epochs = np.empty(len(sources), dtype=np.int64), np.empty(len(sources), dtype=np.int64)
        for source, used in enumerate(self.mixture.used(first)):
            places = np.flatnonzero(sources == source)
            if len(places):
                order = self._order(segment, source)
                numbers[places] = order.at(used, len(places))
                epochs[places] = np.arange(used, used + len(places), dtype=np.int64) // order.rows
        return first, last, Picks(sources, numbers, epochs)

    def _order(self, segment: Segment, source: int) -> RowOrder:
        key = (segment.phase.number, source)
        if key not in self._orders:
            rows = segment.phase.counts[source]
            self._orders[key] = RowOrder(rows, self._seed, self.sources[source], segment.phase.number)
        return self._orders[key]

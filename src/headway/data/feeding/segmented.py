"""The plan of a run that was changed midway: one plan after another, each of which continues where the last ended.

Where a segment begins, some rows of the current epoch have been used and others have not. The remaining rows come
first, shuffled again together with the rows of added data; whole epochs follow. So within an epoch no row is used twice
and none is skipped, whatever was changed. If the used rows cannot be identified among the rows of the new segment, the
change is rejected, unless it starts a new epoch (`Segment.new_epoch`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.feeding.continuation import Continuation, RowMap, map_rows
from headway.data.feeding.mixture import Beginning, is_mixed, length_at, plan_mixture
from headway.data.feeding.plan import EpochUse, MixedPlan, Picks, PlainPlan, RowPlan

if TYPE_CHECKING:
    from headway.config import DataConfig, TrainConfig
    from headway.config.schema import RowSettings
    from headway.config.sections.segments import Segment
    from headway.data.feeding.split import SplitRows

#: Name of the only source of a run on a map-style dataset.
DATASET = "dataset"


@dataclass(frozen=True)
class Border:
    """How epochs continue where a segment begins."""

    row_map: RowMap | None
    """None if a new epoch of all data begins."""
    numbers: dict[int, int]
    """Number of each source in the earlier segment."""
    before: dict[int, int]
    """The current epoch of each source of the earlier segment."""
    after: dict[int, tuple[int, bool]]
    """The epoch of each source with which the new segment continues, and whether some of it was used."""


class SegmentedPlan:
    """The plans of a run's segments, one after another (`headway.data.feeding.plan.RowPlan`).

    Args:
        segments: Of a resolved config.
        sections: What determines rows in each of them (`Config.segment_sections`).

    Raises:
        ConfigError: A segment cannot continue where the one before ended.
    """

    def __init__(self, segments: Sequence[Segment], sections: Sequence[tuple[DataConfig, TrainConfig]]) -> None:
        self.segments = segments
        self.firsts = [segment.first_step for segment in self.segments]
        self.plans: list[RowPlan] = []
        #: Per segment, the map from the rows of the segment before; None for the first segment and for a new epoch.
        self.row_maps: list[RowMap | None] = []
        for number, (data, train) in enumerate(sections, 1):
            plan, row_map = _plan_after(data, train, segments[:number], self.plans[-1:])
            self.plans.append(plan)
            self.row_maps.append(row_map)
        names = [name for plan in reversed(self.plans) for name in plan.sources]
        self._names = tuple(dict.fromkeys(names))
        self._numbers = [
            np.array([self._names.index(name) for name in plan.sources], dtype=np.intp) for plan in self.plans
        ]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the last segment's sources, then those of other sources of earlier segments."""
        return self._names

    def number_at(self, step: int) -> int:
        """Return the number of the segment that contains a step."""
        return bisect_right(self.firsts, step) - 1

    def borders(self, step: int, end: int) -> tuple[int, int]:
        """Return the first step of a step's segment, and the step after its last, in a run of `end` steps."""
        number = self.number_at(step)
        return self.firsts[number], self.firsts[number + 1] if number + 1 < len(self.firsts) else end

    def own_sources(self, step: int, sources: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the numbers that the segment of a step gives to sources, (n,)."""
        numbers = self._numbers[self.number_at(step)]
        place = np.full(len(self._names), -1, dtype=np.intp)
        place[numbers] = np.arange(len(numbers), dtype=np.intp)
        return place[sources]

    def plan_at(self, step: int) -> RowPlan:
        """Return the plan of a step's segment."""
        return self.plans[self.number_at(step)]

    def sequence_length(self, step: int) -> int:
        """Return the tokens per row in a step."""
        return self.plan_at(step).sequence_length(step)

    def step_rows(self, step: int) -> int:
        """Return the number of rows in a step."""
        return self.plan_at(step).step_rows(step)

    def picks(self, step: int, start: int, stop: int) -> Picks:
        """Return rows `start` to `stop` (exclusive) of a step."""
        picks = self.plan_at(step).picks(step, start, stop)
        return Picks(self._numbers[self.number_at(step)][picks.sources], picks.rows, picks.epochs)

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in steps `first` to `last` (exclusive)."""
        counts = [0] * len(self._names)
        for number, start, end in self._parts(first, last):
            for source, rows in zip(self._numbers[number], self.plans[number].counts(start, end), strict=True):
                counts[source] += rows
        return counts

    def epochs(self, step: int) -> list[float]:
        """Return the epochs of each source by the end of a step, since the row length last changed."""
        return self._spread(step, self.plan_at(step).epochs(step), 0.0)

    def epoch_rows(self, step: int) -> list[int]:
        """Count the rows of each source in an epoch, at the row length of a step."""
        return self._spread(step, self.plan_at(step).epoch_rows(step), 0)

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut steps `first` to `last` (exclusive) where the row length or the segment changes."""
        for number, start, end in self._parts(first, last):
            yield from self.plans[number].stretches(start, end)

    def begun(self, step: int) -> int:
        """Return the step at which the epoch count of `step` began."""
        number = self.number_at(step)
        begun = self.plans[number].begun(step)
        row_map = self.row_maps[number]
        carries = row_map is not None and row_map.cut == 1
        return self.begun(begun - 1) if carries and begun == self.firsts[number] else begun

    def by_epoch(self, first: int, last: int) -> Iterator[EpochUse]:
        """Yield the use of each epoch in steps `first` to `last` (exclusive), which lie in one of `stretches`."""
        number = self.number_at(first)
        for use in self.plans[number].by_epoch(first, last):
            yield use._replace(source=int(self._numbers[number][use.source]))

    def border(self, first: int) -> Border:
        """Return how epochs continue at the first step of a segment other than the first."""
        number = self.firsts.index(first)
        earlier = self._numbers[number - 1].tolist()
        later = self._numbers[number].tolist()
        ends = _positions(self.plans[number - 1], first - 1, after=True)
        begins = _positions(self.plans[number], first, after=False)
        return Border(
            self.row_maps[number],
            {source: place for place, source in enumerate(earlier)},
            {source: at // rows if rows else 0 for source, (at, rows) in zip(earlier, ends, strict=True)},
            {
                source: (at // rows, at % rows > 0) if rows else (0, False)
                for source, (at, rows) in zip(later, begins, strict=True)
            },
        )

    def describe(self, last: int) -> dict[str, Any]:
        """Describe all but the store that determines the rows of the steps before `last`.

        Before the first change, the description is that of a run without changes.
        """
        number = self.number_at(max(0, last - 1))
        if number == 0:
            return self.plans[0].describe(last)
        # For the last segment the plan's own description covers `steps`: a longer run may have equal rows.
        excluded = {"changes", "shards", "row_tokens"}
        per_segment = [*(excluded for _ in range(number)), {*excluded, "steps"}]
        pairs = zip(self.segments, per_segment, strict=False)
        segments = [segment.model_dump(mode="json", exclude=fields) for segment, fields in pairs]
        return {"segments": segments, "last": self.plans[number].describe(last)}

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Cut steps at the borders of segments; yield segment number, first step, and the step after the last."""
        for number, start in enumerate(self.firsts):
            end = self.firsts[number + 1] if number + 1 < len(self.firsts) else last
            begin = max(first, start)
            end = min(last, end)
            if begin < end:
                yield number, begin, end

    def _spread(self, step: int, values: Sequence[Any], missing: Any) -> list[Any]:
        result = [missing] * len(self._names)
        for source, value in zip(self._numbers[self.number_at(step)], values, strict=True):
            result[source] = value
        return result


def plan_of(settings: RowSettings, rows: SplitRows) -> RowPlan:
    """Make the plan of a resolved config's settings for the rows of a store.

    Raises:
        ConfigError: Sources run out before the last step, or the config and the store have different sources.
        DataError: A source that has a weight has no row.
    """
    if settings.segments:
        return SegmentedPlan(settings.segments, settings.sections)
    train = settings.train
    if not is_mixed(settings.data):
        length = train.sequence_length
        return PlainPlan(rows.sources, rows.counts(length), settings.seed, train.batches, length)
    mixture = plan_mixture(settings.data, train, rows.sources, rows.counts, where=rows.where)
    return MixedPlan(mixture, settings.seed)


def dataset_plan(settings: RowSettings, rows: int) -> RowPlan:
    """Make the plan of a resolved config's settings for a map-style dataset with so many rows.

    Raises:
        DataError: The dataset is empty.
    """
    if not rows:
        raise DataError("the dataset has no rows", where=DATASET, fix="give it at least one")
    if settings.segments:
        return SegmentedPlan(settings.segments, settings.sections)
    return PlainPlan([DATASET], [rows], settings.seed, settings.train.batches)


def describe_rows(plan: RowPlan, rows: SplitRows, last_step: int) -> dict[str, Any]:
    """Describe, as plain JSON, all but the store that determines the rows of the steps before `last_step`."""
    packing = rows.packing
    document_mask = rows.document_mask
    if isinstance(plan, SegmentedPlan):
        segment = plan.segments[plan.number_at(max(0, last_step - 1))]
        packing = segment.packing
        document_mask = segment.document_mask
    return {**plan.describe(last_step), "packing": packing, "document_mask": document_mask}


def _positions(plan: RowPlan, step: int, after: bool) -> list[tuple[int, int]]:
    """Return, per source, the position in its sequence before (or after) a step and the rows of an epoch there."""
    if isinstance(plan, PlainPlan):
        return [(plan.position(step + after), plan.order.rows)] * len(plan.sources)
    assert isinstance(plan, MixedPlan), "there are two kinds"
    used = plan.mixture.used_after(step) if after else plan.mixture.used(step)
    return list(zip(used, plan.epoch_rows(step), strict=True))


def _plan_after(
    data: DataConfig, train: TrainConfig, segments: Sequence[Segment], plans: Sequence[RowPlan]
) -> tuple[RowPlan, RowMap | None]:
    """Make the plan of the last of some segments, and the map from the rows of the segment before.

    Args:
        data: The section of that segment.
        train: The section of that segment.
        plans: The plan of the segment before, if there is one.
    """
    segment = segments[-1]
    names = tuple(segment.rows)
    mixed = is_mixed(data)

    def rows_of(length: int) -> list[int]:
        return [sum(parts.get(length, ())) for parts in segment.rows.values()]

    if not plans:
        if mixed:
            return MixedPlan(plan_mixture(data, train, names, rows_of), segment.seed), None
        length = segment.sequence_length
        return PlainPlan(names, rows_of(length), segment.seed, train.batches, length), None
    before = plans[0]
    step = segment.first_step
    length = length_at(data.mixture, train, step) if mixed else segment.sequence_length
    counts = rows_of(length)
    row_map = None
    if not segment.new_epoch:
        row_map = map_rows(segments[-2], segment, before.sequence_length(step - 1), length)
    continuation = Continuation(before, step, counts, row_map, segment.seed)
    if mixed:
        orders, used = continuation.orders_by_source(names)
        beginning = Beginning(step, continuation.phase, tuple(used), tuple(continuation.epochs_before(names)))
        mixture = plan_mixture(data, train, names, rows_of, beginning=beginning)
        return MixedPlan(mixture, segment.seed, orders), row_map
    plain = PlainPlan(names, counts, segment.seed, train.batches, length)
    order, position = continuation.order_of_all(plain)
    start = (step, position)
    return PlainPlan(names, counts, segment.seed, train.batches, length, order=order, start=start), row_map

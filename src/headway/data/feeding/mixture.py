"""The share of training that each source has at each step: weights, temperature, limits on epochs, and stages.

The mixture is computed once, as a short list of segments: ranges of steps in which the shares are constant. A segment
knows how many rows each source has given before it. Everything else about a step follows from its segment, without
looking at the steps before (`headway.data.feeding.source_order`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from headway.config.sections.data import stored_names
from headway.core.errors import ConfigError, DataError
from headway.core.user_command import suggest
from headway.data.feeding.source_order import MAX_ROWS, boundaries, counts_between

if TYPE_CHECKING:
    from headway.config.sections.data import DataConfig, MixtureConfig
    from headway.config.sections.train import TrainConfig

#: A linear change of weights is made in at most this many constant parts of equal length.
RAMP_PARTS = 64

Shares = tuple[Fraction, ...]


@dataclass(frozen=True)
class Phase:
    """Steps whose rows have one length. Each phase reads the sources from their beginning."""

    number: int
    sequence_length: int
    counts: tuple[int, ...]
    """Rows that each source has, of this length."""


@dataclass(frozen=True)
class Segment:
    """Steps `first_step` to `last_step` (exclusive), in which shares and the number of rows are constant."""

    phase: Phase
    step_rows: int
    """Rows of a step."""
    first_step: int
    last_step: int
    shares: Shares
    used: tuple[int, ...]
    """Rows of each source that the phase has used before `first_step`."""

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The shares as intervals; see `headway.data.feeding.source_order.boundaries`."""
        return boundaries(self.shares, self.step_rows)

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in those of steps `first` to `last` (exclusive) that are in this segment."""
        first = max(first, self.first_step)
        last = min(last, self.last_step)
        return counts_between(self.bounds, first, last) if first < last else [0] * len(self.shares)


@dataclass(frozen=True)
class Beginning:
    """The point in a run where a mixture begins that follows earlier steps."""

    step: int
    phase: int
    """Number of the first phase."""
    used: tuple[int, ...]
    """Position of each source in its sequence: rows of the first phase's length that count as used."""
    epochs: tuple[Fraction, ...]
    """Epochs of each source in the phases that are over."""


@dataclass(frozen=True)
class Mixture:
    """The segments of a run, in order and without gaps."""

    sources: tuple[str, ...]
    segments: tuple[Segment, ...]
    epochs_before: tuple[Fraction, ...] = ()
    """Epochs of each source in the phases that were over when the mixture began; zeros when not given."""

    @property
    def first_step(self) -> int:
        """The first step of the mixture."""
        return self.segments[0].first_step

    @property
    def steps(self) -> int:
        """The step after the last one of the mixture."""
        return self.segments[-1].last_step

    def segment_at(self, step: int) -> Segment:
        """Return the segment that contains a step.

        Raises:
            IndexError: The mixture has no such step.
        """
        if not self.first_step <= step < self.steps:
            raise IndexError(f"step {step} is not one of the {self.steps} of the mixture")
        return self.segments[bisect_right(self.segments, step, key=lambda segment: segment.first_step) - 1]

    def counts(self, first: int, last: int) -> list[int]:
        """Count the rows of each source in steps `first` to `last` (exclusive), whatever their length."""
        parts = [segment.counts(first, last) for segment in self.segments]
        return [sum(column) for column in zip(*parts, strict=True)]

    def used(self, step: int) -> list[int]:
        """Count the rows of each source that the phase of `step` used before it."""
        segment = self.segment_at(step)
        before = segment.counts(segment.first_step, step)
        return [used + more for used, more in zip(segment.used, before, strict=True)]

    def used_after(self, step: int) -> list[int]:
        """Count the rows of each source that the phase of `step` used up to and including that step."""
        more = self.counts(step, step + 1)
        return [used + taken for used, taken in zip(self.used(step), more, strict=True)]

    def epochs_of_phases_before(self, step: int) -> list[Fraction]:
        """Return the epochs of each source in the phases before that of `step`."""
        epochs = list(self.epochs_before or [Fraction(0)] * len(self.sources))
        phase = self.segment_at(step).phase.number
        ends = {s.phase.number: s for s in self.segments if s.phase.number < phase}  # the last one of each phase
        for end in ends.values():
            used = self.used_after(end.last_step - 1)
            for number, (rows, count) in enumerate(zip(used, end.phase.counts, strict=True)):
                epochs[number] += Fraction(rows, count) if count else 0
        return epochs


def is_mixed(data: DataConfig) -> bool:
    """Return whether the config asks for anything other than every row of every source equally often."""
    mixture = data.mixture
    return bool(
        mixture.stages
        or mixture.temperature != 1
        or any(source.weight is not None or source.max_epochs is not None for source in data.sources)
    )


def plan_mixture(
    data: DataConfig,
    train: TrainConfig,
    sources: Sequence[str],
    rows_of: Callable[[int], Sequence[int]],
    *,
    where: str | None = None,
    beginning: Beginning | None = None,
) -> Mixture:
    """Compute the segments of a run.

    Args:
        data: Of a resolved config.
        train: Of a resolved config.
        sources: The sources that the store has.
        rows_of: Rows of each of these, given the sequence length.
        where: The store's place, for messages.
        beginning: Where the mixture begins, if that is in the middle of the run.

    Raises:
        ConfigError: Sources run out before the last step, or the config and the store have different sources.
        DataError: A source that has a weight has no row.
    """
    return _Planner(data, train, tuple(sources), rows_of, where=where, beginning=beginning).plan()


def length_at(mixture: MixtureConfig, train: TrainConfig, step: int) -> int:
    """Return the tokens per row that the stages of a resolved config ask for in a step."""
    assert train.steps is not None, "the config is resolved"
    length = train.sequence_length
    for stage in mixture.stages:
        if stage.first_step(train.steps, train.batches) <= step:
            length = stage.sequence_length or length
    return length


class _Planner:
    """Appends one segment after another and counts the rows that each source has given."""

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        sources: tuple[str, ...],
        rows_of: Callable[[int], Sequence[int]],
        *,
        where: str | None,
        beginning: Beginning | None,
    ) -> None:
        assert train.steps is not None, "the config is resolved"
        self._mixture = data.mixture
        self._train = train
        self._sources = sources
        self._rows_of = rows_of
        self._where = where
        self._steps = train.steps
        self._batches = train.batches
        names = stored_names(data.sources)
        given = dict(zip(names, data.sources, strict=True))
        self._stored = {str(source.name): name for name, source in given.items()}
        self._weights = {name: source.weight for name, source in given.items() if source.weight is not None} or None
        self._check_sources()
        caps = [given[name].max_epochs if name in given else None for name in sources]
        self._caps = [None if cap is None else exact(cap) for cap in caps]
        nothing = Beginning(0, 0, (0,) * len(sources), (Fraction(0),) * len(sources))
        self._begin = beginning or nothing
        self._epochs = list(self._begin.epochs)  # in phases that are over
        self._used = list(self._begin.used)  # rows of each source, in the current phase
        self._segments: list[Segment] = []

    def plan(self) -> Mixture:
        mixture = self._mixture
        phase = self._phase(self._begin.phase, self._train.sequence_length)
        weights = self._weights
        start = 0
        starts = [stage.first_step(self._steps, self._batches) for stage in mixture.stages]
        for stage, first in zip(mixture.stages, starts, strict=True):
            if first >= self._steps:
                break
            self._append_weights(phase, start, first, weights)
            before = weights
            start = first
            if stage.weights is not None:
                weights = {self._stored.get(name, name): weight for name, weight in stage.weights.items()}
            length = stage.sequence_length or phase.sequence_length
            if length != phase.sequence_length:
                begun = first > self._begin.step
                phase = self._next_phase(phase, length) if begun else self._phase(self._begin.phase, length)
            ending = min([s for s in starts if s > first], default=self._steps)
            if stage.change == "linear":
                start = min(ending, self._steps)
                self._append_ramp(phase, first, start, self._shares(before, phase), self._shares(weights, phase))
        self._append_weights(phase, start, self._steps, weights)
        return Mixture(self._sources, tuple(self._segments), self._begin.epochs)

    def _check_sources(self) -> None:
        unknown = sorted(set(self._sources) - set(self._stored.values()))
        if self._weights is not None and unknown:
            raise ConfigError(
                f"the store has sources that the config gives no weight: {', '.join(unknown)}",
                where=f"data.sources, {self._where}" if self._where else "data.sources",
                fix=suggest("data prepare"),
            )

    def _phase(self, number: int, length: int) -> Phase:
        rows = self._train.tokens_per_step // length
        if rows > MAX_ROWS:
            raise ConfigError(
                f"a step of {rows:,} rows is too large for a mixture; {MAX_ROWS:,} is the most",
                where="train.global_batch",
                fix=f"train.global_batch={MAX_ROWS}",
            )
        return Phase(number, length, tuple(self._rows_of(length)))

    def _next_phase(self, phase: Phase, length: int) -> Phase:
        for number, (used, count) in enumerate(zip(self._used, phase.counts, strict=True)):
            self._epochs[number] += Fraction(used, count) if count else 0
        self._used = [0] * len(self._sources)
        return self._phase(phase.number + 1, length)

    def _shares(self, weights: Mapping[str, float] | None, phase: Phase) -> Shares:
        """Compute shares that sum to 1, from weights or else from the sources' rows and the temperature."""
        if weights is None:
            temperature = self._mixture.temperature
            return normalized([powered(count, 1 / exact(temperature)) for count in phase.counts])
        for name, weight in weights.items():
            if weight and not dict(zip(self._sources, phase.counts, strict=True)).get(name):
                raise DataError(
                    f"source '{name}' has the weight {weight:g}, but not the {phase.sequence_length + 1:,} tokens of"
                    " one row",
                    where=self._where,
                    fix=f"add text to it, or omit it: weight 0 in a stage, or no source '{name}'",
                )
        return normalized([exact(weights.get(name, 0)) for name in self._sources])

    def _append_ramp(self, phase: Phase, first: int, last: int, before: Shares, after: Shares) -> None:
        """Append parts of equal length, each with the shares at its middle."""
        parts = min(RAMP_PARTS, last - first)
        for part in range(parts):
            way = Fraction(2 * part + 1, 2 * parts)
            shares = tuple(b + (a - b) * way for b, a in zip(before, after, strict=True))
            start, end = (first + number * (last - first) // parts for number in (part, part + 1))
            self._append_shares(phase, start, end, shares)

    def _append_weights(self, phase: Phase, first: int, last: int, weights: Mapping[str, float] | None) -> None:
        if max(first, self._begin.step) < last:  # weights that hold for no step need not have rows
            self._append_shares(phase, first, last, self._shares(weights, phase))

    def _append_shares(self, phase: Phase, first: int, last: int, shares: Shares) -> None:
        """Append segments with constant shares; a source that runs out on the way drops out."""
        for start, end, rows in self._batches.stretches(max(first, self._begin.step), last):
            step_rows = rows * self._batches.sequence_length // phase.sequence_length
            self._append_constant(phase, step_rows, start, end, shares)

    def _append_constant(self, phase: Phase, step_rows: int, first: int, last: int, shares: Shares) -> None:
        while first < last:
            left = self._rows_left(phase)
            shares_left = [Fraction(0) if rows == 0 else share for share, rows in zip(shares, left, strict=True)]
            if not any(shares_left):
                raise self._exhausted(phase, first, 0)
            segment = Segment(phase, step_rows, first, last, normalized(shares_left), tuple(self._used))
            end = _last_step_within(segment, left)
            if end > first:
                self._append(replace(segment, last_step=end))
            else:
                self._append(self._last_rows(segment, left))
                end += 1
            first = end

    def _last_rows(self, segment: Segment, left: Sequence[int | None]) -> Segment:
        """Return one step that takes all remaining rows of the sources that end in it, and the rest from others."""
        rows = segment.step_rows
        asked = segment.shares
        ending: dict[int, int] = {}
        while True:
            free = [share if number not in ending else Fraction(0) for number, share in enumerate(asked)]
            rest = rows - sum(ending.values())
            if not any(free):
                raise self._exhausted(segment.phase, segment.first_step, sum(ending.values()))
            of_rest = normalized(free)
            shares = tuple(
                Fraction(ending[number], rows) if number in ending else of_rest[number] * rest / rows
                for number in range(len(asked))
            )
            step = replace(segment, last_step=segment.first_step + 1, shares=shares)
            more = _overdrawn(step, left, step.last_step)
            if not more:
                return step
            ending.update(more)

    def _append(self, segment: Segment) -> None:
        counts = segment.counts(segment.first_step, segment.last_step)
        self._used = [used + more for used, more in zip(segment.used, counts, strict=True)]
        last = self._segments[-1] if self._segments else None
        if last and _constants(last) == _constants(segment):
            self._segments[-1] = replace(last, last_step=segment.last_step)
        else:
            self._segments.append(segment)

    def _rows_left(self, phase: Phase) -> list[int | None]:
        """Return the rows that each source may still give; None means no limit."""
        return [
            None if cap is None else max(0, int((cap - epochs) * count) - used)
            for cap, epochs, count, used in zip(self._caps, self._epochs, phase.counts, self._used, strict=True)
        ]

    def _exhausted(self, phase: Phase, step: int, rows: int) -> ConfigError:
        tokens = self._batches.tokens_before(self._steps) - self._batches.tokens_before(step)
        missing = tokens - rows * phase.sequence_length
        return ConfigError(
            f"the sources are used up at step {step:,} of {self._steps:,}: {missing:,} tokens are missing",
            where="data.sources.*.max_epochs, data.mixture, train.steps",
            fix=f"allow more epochs, add text, or train.steps={max(1, step)}",
        )


def _constants(segment: Segment) -> tuple[Phase, int, Shares]:
    """Return the values that are constant within a segment."""
    return segment.phase, segment.step_rows, segment.shares


def _overdrawn(segment: Segment, left: Sequence[int | None], step: int) -> dict[int, int]:
    """Return the sources of which the segment takes more than is left before `step`, with the rows that are left."""
    counts = segment.counts(segment.first_step, step)
    pairs = enumerate(zip(counts, left, strict=True))
    return {number: rows for number, (count, rows) in pairs if rows is not None and count > rows}


def _last_step_within(segment: Segment, left: Sequence[int | None]) -> int:
    """Find by bisection the last step up to which no source gives more than is left."""
    low = segment.first_step
    high = segment.last_step
    if all(rows is None for rows in left) or not _overdrawn(segment, left, high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _overdrawn(segment, left, middle) else (middle, high)
    return low


def exact(number: float) -> Fraction:
    """Return a number as it was written: 0.1 becomes a tenth."""
    return Fraction(repr(number))


def normalized(weights: Sequence[Fraction]) -> Shares:
    """Scale weights so that they sum to 1.

    Raises:
        DataError: All weights are 0.
    """
    total = sum(weights)
    if not total:
        raise DataError("no source has a row to train on", fix="add text, or give a source with text a weight")
    return tuple(weight / total for weight in weights)


def powered(count: int, exponent: Fraction) -> Fraction:
    """Compute count^exponent to 30 digits, identically on every machine, which floating point does not promise."""
    if exponent == 1 or count < 2:
        return Fraction(count)
    with localcontext() as context:
        context.prec = 40
        value = (Decimal(count).ln() * exponent.numerator / exponent.denominator).exp()
        context.prec = 30
        return Fraction(+value)

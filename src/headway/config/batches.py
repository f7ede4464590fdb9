"""Rows per step: constant, fewer at the beginning (`train.batch_ramp`), or changed during a run.

All conversions between steps, rows and tokens go through `Batches`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Annotated, Any

from pydantic import WithJsonSchema, field_validator

from headway.config.base import Section, conflict
from headway.config.units import Interval, StepInterval, parse_count, written


class BatchStage(Section):
    """Smaller batches, up to a point of training."""

    global_batch: Annotated[int | str, WithJsonSchema(written("rows", "tokens"))]
    """Rows in one optimizer step, or tokens: `64Ki tokens`."""
    until: StepInterval
    """Where the stage ends: `1000 steps` or `1B tokens` from the beginning of training."""

    @field_validator("global_batch", mode="before")
    @classmethod
    def _check_quantity(cls, value: Any) -> Any:
        return batch_quantity(value)


def batch_quantity(value: Any) -> Any:
    """Check a global batch as a person writes it, and return it unchanged.

    Raises:
        ValueError: it is not a number of rows or tokens, or is less than 1.
    """
    if parse_count(value, "tokens" if _in_tokens(value) else "rows") < 1:
        raise ValueError("must be at least 1")
    return value


def batch_rows(value: int | str, sequence_length: int) -> int:
    """Return the rows of a global batch that is written in rows or tokens."""
    if not _in_tokens(value):
        return parse_count(value, "rows")
    tokens = parse_count(value, "tokens")
    if tokens % sequence_length:
        near = max(1, round(tokens / sequence_length)) * sequence_length
        raise conflict(
            f"global_batch of {tokens} tokens is not a whole number of rows of {sequence_length} tokens;"
            f" the nearest is {near} tokens",
            "global_batch",
            "sequence_length",
        )
    return tokens // sequence_length


def _in_tokens(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower().rstrip("s").endswith("token")


@dataclass(frozen=True)
class Batches:
    """The rows of every step (counted from 0) of a run of any length."""

    parts: tuple[tuple[int, int], ...]
    """First step and rows per step of each stretch, by step; the first begins at 0, the last has no end."""
    sequence_length: int = 1
    """Tokens per row."""
    before: Batches | None = None
    """Batches of the steps before `begins`, which ran with another config (`config.segments`)."""
    begins: int = 0
    """The step from which `parts` and `sequence_length` hold."""

    @classmethod
    def planned(
        cls,
        stages: Sequence[BatchStage],
        last_rows: int,
        sequence_length: int,
        before: Batches | None = None,
        begins: int = 0,
    ) -> Batches:
        """Plan the batches from the stages of a ramp and the rows of the steps after it.

        Args:
            stages: The stages of the ramp, in order.
            last_rows: Rows of each step after the ramp.
            sequence_length: Tokens per row.
            before: The batches of the steps before `begins`, if the run was changed there.
            begins: The step from which this plan holds.
        """
        starts = [0]
        sizes = [batch_rows(stage.global_batch, sequence_length) for stage in stages]
        for number, stage in enumerate(stages):
            # The end of this stage does not depend on later stages.
            so_far = cls(tuple(zip(starts, sizes, strict=False)), sequence_length, before, begins)
            end = so_far.steps_of(stage.until)
            if end <= starts[-1] and end > begins:
                raise conflict(
                    f"the batches of {sizes[number]} rows would end at step {end:,}, before they begin;"
                    " put the stages in order, each at least one step long",
                    "batch_ramp",
                )
            starts.append(end)
        falling = next((a for a, b in pairwise([*sizes, last_rows]) if a >= b), None)
        if falling is not None:
            raise conflict(
                f"batches must grow from stage to stage and then to global_batch ({last_rows} rows);"
                f" {falling} rows are not followed by more",
                "batch_ramp",
                "global_batch",
            )
        return cls(tuple(zip(starts, [*sizes, last_rows], strict=True)), sequence_length, before, begins)

    @property
    def sizes(self) -> list[int]:
        """The distinct numbers of rows per step from `begins` on."""
        ends = [*(first for first, _ in self.parts[1:]), math.inf]
        return list(dict.fromkeys(rows for (_, rows), end in zip(self.parts, ends, strict=True) if end > self.begins))

    @property
    def common_rows(self) -> int:
        """The greatest common divisor of `sizes`, which lanes and micro-batches have to divide."""
        return gcd(*self.sizes)

    def rows(self, step: int) -> int:
        """Return the rows of a step."""
        if self.before is not None and step < self.begins:
            return self.before.rows(step)
        return next(rows for first, rows in reversed(self.parts) if first <= step)

    def length(self, step: int) -> int:
        """Return the tokens per row in a step."""
        if self.before is not None and step < self.begins:
            return self.before.length(step)
        return self.sequence_length

    def rows_before(self, step: int) -> int:
        """Count the rows of all steps before one, whatever their length."""
        return sum((last - first) * rows for first, last, rows in self.stretches(0, step))

    def tokens_before(self, step: int) -> int:
        """Count the tokens of all steps before one, which is the amount trained on after so many steps."""
        if self.before is None:
            return self.rows_before(step) * self.sequence_length
        if step <= self.begins:
            return self.before.tokens_before(step)
        return self.before.tokens_before(self.begins) + self._own_rows(self.begins, step) * self.sequence_length

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Split steps `first` to `last` (exclusive) where the rows per step change: (from, to, rows per step)."""
        if self.before is not None:
            yield from self.before.stretches(first, min(last, self.begins))
            first = max(first, self.begins)
        yield from self._own_stretches(first, last)

    def _own_rows(self, first: int, last: int) -> int:
        return sum((end - start) * rows for start, end, rows in self._own_stretches(first, last))

    def _own_stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        ends = [start for start, _ in self.parts[1:]]
        for (start, rows), end in zip(self.parts, [*ends, last], strict=True):
            a = max(first, start)
            b = min(last, end)
            if a < b:
                yield a, b, rows

    def row_parts(self) -> list[tuple[int, int]]:
        """Return first step and rows per step of each stretch, by step; the first begins at 0, the last has no end."""
        before = [] if self.before is None else self.before.row_parts()
        ends = [*(first for first, _ in self.parts[1:]), math.inf]
        own = zip(self.parts, ends, strict=True)
        return [
            *((first, rows) for first, rows in before if first < self.begins),
            *((max(first, self.begins), rows) for (first, rows), end in own if end > self.begins),
        ]

    def token_parts(self) -> list[tuple[int, int]]:
        """Return first step and tokens per step of each stretch, like `row_parts`."""
        return [(first, rows * self.length(first)) for first, rows in self.row_parts()]

    def steps_for(self, tokens: int) -> int:
        """Return the fewest steps that train on at least so many tokens."""
        return self._step_near(tokens, lambda tokens, per_step: -(-tokens // per_step))

    def steps_of(self, interval: Interval) -> int:
        """Convert an interval of steps or tokens, from the beginning on, to the nearest number of steps, at least 1."""
        assert interval.unit != "seconds", "a time is not a number of steps"
        if interval.unit == "steps":
            return interval.amount
        # Halves are rounded up: `round` goes by whether the steps so far are even, so that the same amount would become
        # another number of steps for a run that was changed on the way.
        return max(1, self._step_near(interval.amount, lambda tokens, per_step: (tokens + per_step // 2) // per_step))

    def last_steps_of(self, interval: Interval, steps: int) -> int:
        """Convert an interval, counted back from the end of a run of `steps`, to the nearest number of steps."""
        stretches = list(self.stretches(0, steps))
        per_step = [self.tokens_before(first + 1) - self.tokens_before(first) for first, _, _ in stretches]
        mirrored = [(steps - last, tokens) for (_, last, _), tokens in zip(stretches, per_step, strict=True)][::-1]
        return Batches(tuple(mirrored)).steps_of(interval)

    def is_due(self, interval: Interval | None, step: int) -> bool:
        """Return whether a periodic event is due after `step` finished steps; never if its interval is a time.

        With an interval in tokens, it is due after the first step that reaches each multiple.
        """
        if interval is None or interval.unit == "seconds":
            return False
        if interval.unit == "steps":
            return step % interval.amount == 0
        return self.tokens_before(step) // interval.amount > self.tokens_before(step - 1) // interval.amount

    def is_due_between(self, interval: Interval, step: int, end: int) -> bool:
        """Return whether the event is due after any step between `step` and `end`, both excluded."""
        if interval.unit == "seconds":
            return False
        last = max(step, end - 1)
        if interval.unit == "steps":
            return last // interval.amount > step // interval.amount
        return self.tokens_before(last) // interval.amount > self.tokens_before(step) // interval.amount

    def due_steps(self, interval: Interval, end: int) -> Iterator[int]:
        """Yield the numbers of finished steps, below `end`, after which a periodic event is due (`is_due`)."""
        assert interval.unit != "seconds", "a time is not known in steps"
        if interval.unit == "steps":
            yield from range(interval.amount, end, interval.amount)
            return
        multiple = 1
        while (step := self.steps_for(multiple * interval.amount)) < end:
            yield step
            multiple = self.tokens_before(step) // interval.amount + 1

    def thinned(self, steps: Iterable[int], interval: Interval) -> Iterator[int]:
        """Yield, of rising numbers of steps, the first, and the first at or after each multiple of the interval.

        So checkpoints are uploaded (`checkpoint.contents.crossed`): an upload waits for a save.
        """
        last = None
        for step in steps:
            if last is None or self.is_due_between(interval, last, step + 1):
                yield step
                last = step

    def first_meeting(self, one: Interval, other: Interval, end: int) -> int | None:
        """Return the first number of finished steps, below `end`, after which both events are due; None if none is."""
        rarer, other = sorted((one, other), key=self.steps_of, reverse=True)
        return next((step for step in self.due_steps(rarer, end) if self.is_due(other, step)), None)

    def in_words(self, steps: int) -> str:
        """Describe the batches of a run, with their length if it changes: "64 rows from step 0, 128 rows from ..."."""
        stretches = list(self.stretches(0, steps))
        several = len({self.length(first) for first, _, _ in stretches}) > 1
        return ", ".join(
            f"{rows} rows{f' of {self.length(first):,} tokens' if several else ''} from step {first:,}"
            for first, _, rows in stretches
        )

    def sum_in_words(self, steps: int, *, of_rows: str | None = None) -> str:
        """Return the length of a run: "100 steps of 512 tokens", where they change those that there are at last.

        Args:
            steps: Number of steps.
            of_rows: What rows are called where they do not consist of tokens, as in a task of the user's own.
        """
        rows = self.parts[-1][1]
        size = f"{rows:,} {of_rows}" if of_rows else f"{rows * self.sequence_length:,} tokens"
        since = self.parts[-1][0] if self.before is None else max(self.begins, self.parts[-1][0])
        changed = f" from step {since:,} on" if self.before is not None else ""
        return f"{steps:,} steps of {size}{changed}"

    def _step_near(self, tokens: int, rounded: Callable[[int, int], int]) -> int:
        if self.before is not None and tokens <= self.before.tokens_before(self.begins):
            return self.before._step_near(tokens, rounded)
        for (first, rows), (end, _) in zip(self.parts, [*self.parts[1:], (None, 0)], strict=True):
            first = max(first, self.begins)
            if end is None or (end > self.begins and tokens <= self.tokens_before(end)):
                return first + rounded(tokens - self.tokens_before(first), rows * self.sequence_length)
        raise AssertionError("the last part has no end")

"""How many rows each step has: constant, fewer in the beginning (`train.batch_ramp`), or changed on the way.

Everything that asks where a step lies in the data, or which step an amount of tokens leads to, asks here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    """The point: `1000 steps` or `1B tokens` from the beginning of training."""

    @field_validator("global_batch", mode="before")
    @classmethod
    def _batch_is_a_quantity(cls, value: Any) -> Any:
        return batch_quantity(value)


def batch_quantity(value: Any) -> Any:
    """A global batch as it may be written.

    Raises:
        ValueError: it is no number of rows or tokens, or less than 1.
    """
    if parse_count(value, "tokens" if _in_tokens(value) else "rows") < 1:
        raise ValueError("must be at least 1")
    return value


def batch_rows(value: int | str, sequence_length: int) -> int:
    """Rows of a global batch that is written in rows or tokens."""
    if not _in_tokens(value):
        return parse_count(value, "rows")
    tokens = parse_count(value, "tokens")
    if tokens % sequence_length:
        near = max(1, round(tokens / sequence_length)) * sequence_length
        raise conflict(
            f"global_batch of {tokens} tokens is no whole number of rows of {sequence_length} tokens;"
            f" the nearest is {near} tokens",
            "global_batch",
            "sequence_length",
        )
    return tokens // sequence_length


def _in_tokens(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower().rstrip("s").endswith("token")


@dataclass(frozen=True)
class Batches:
    """The rows of every step, counted from 0, of a run of any length."""

    parts: tuple[tuple[int, int], ...]
    """First step and rows per step of each stretch, by step; the first begins at 0, the last has no end."""
    sequence_length: int = 1
    """Tokens per row."""
    before: Batches | None = None
    """Those of the steps before `begins`, which the run did with another config (`config.segments`)."""
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
        """From the stages of a ramp, and the rows of the steps after it.

        Args:
            before: The batches of the steps before `begins`, where the run was changed there.
        """
        starts, sizes = [0], [batch_rows(stage.global_batch, sequence_length) for stage in stages]
        for number, stage in enumerate(stages):
            # What comes later does not matter for where this stage ends.
            so_far = cls(tuple(zip(starts, sizes, strict=False)), sequence_length, before, begins)
            end = so_far.steps_of(stage.until)
            if end <= starts[-1] and end > begins:
                raise conflict(
                    f"the batches of {sizes[number]} rows would end at step {end:,}, where they have not begun;"
                    " put the stages in their order, each at least one step long",
                    "batch_ramp",
                )
            starts.append(end)
        falling = next((a for a, b in pairwise([*sizes, last_rows]) if a >= b), None)
        if falling is not None:
            raise conflict(
                f"batches rise from stage to stage and then to global_batch ({last_rows} rows);"
                f" {falling} rows are followed by no more",
                "batch_ramp",
                "global_batch",
            )
        return cls(tuple(zip(starts, [*sizes, last_rows], strict=True)), sequence_length, before, begins)

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows that steps from `begins` on have, each once."""
        ends = [*(first for first, _ in self.parts[1:]), math.inf]
        return list(dict.fromkeys(rows for (_, rows), end in zip(self.parts, ends, strict=True) if end > self.begins))

    @property
    def common_rows(self) -> int:
        """The greatest common divisor of them: what lanes and micro-batches have to divide."""
        return gcd(*self.sizes)

    def rows(self, step: int) -> int:
        """Rows of a step."""
        if self.before is not None and step < self.begins:
            return self.before.rows(step)
        return next(rows for first, rows in reversed(self.parts) if first <= step)

    def length(self, step: int) -> int:
        """Tokens per row in a step."""
        if self.before is not None and step < self.begins:
            return self.before.length(step)
        return self.sequence_length

    def rows_before(self, step: int) -> int:
        """Rows of all steps before one, whatever their length."""
        return sum((last - first) * rows for first, last, rows in self.stretches(0, step))

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before one: what has been trained on after so many steps."""
        if self.before is None:
            return self.rows_before(step) * self.sequence_length
        if step <= self.begins:
            return self.before.tokens_before(step)
        return self.before.tokens_before(self.begins) + self._own_rows(self.begins, step) * self.sequence_length

    def stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Steps `first` to `last` (exclusive), cut where the rows per step change: (from, to, rows per step)."""
        if self.before is not None:
            yield from self.before.stretches(first, min(last, self.begins))
            first = max(first, self.begins)
        yield from self._own_stretches(first, last)

    def _own_rows(self, first: int, last: int) -> int:
        return sum((end - start) * rows for start, end, rows in self._own_stretches(first, last))

    def _own_stretches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        ends = [start for start, _ in self.parts[1:]]
        for (start, rows), end in zip(self.parts, [*ends, last], strict=True):
            a, b = max(first, start), min(last, end)
            if a < b:
                yield a, b, rows

    def row_parts(self) -> list[tuple[int, int]]:
        """First step and rows per step of each stretch, by step; the first begins at 0, the last has no end."""
        before = [] if self.before is None else self.before.row_parts()
        ends = [*(first for first, _ in self.parts[1:]), math.inf]
        own = zip(self.parts, ends, strict=True)
        return [
            *((first, rows) for first, rows in before if first < self.begins),
            *((max(first, self.begins), rows) for (first, rows), end in own if end > self.begins),
        ]

    def token_parts(self) -> list[tuple[int, int]]:
        """Return the same with tokens per step."""
        return [(first, rows * self.length(first)) for first, rows in self.row_parts()]

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that train on at least so many tokens."""
        return self._step_near(tokens, lambda tokens, per_step: -(-tokens // per_step))

    def steps_of(self, interval: Interval) -> int:
        """Steps from the beginning on that an interval of steps or tokens comes nearest to, at least 1."""
        assert interval.unit != "seconds", "a time is no number of steps"
        if interval.unit == "steps":
            return interval.amount
        return max(1, self._step_near(interval.amount, lambda tokens, per_step: round(tokens / per_step)))

    def last_steps_of(self, interval: Interval, steps: int) -> int:
        """The same, counted back from the end of a run of `steps`."""
        stretches = list(self.stretches(0, steps))
        per_step = [self.tokens_before(first + 1) - self.tokens_before(first) for first, _, _ in stretches]
        mirrored = [(steps - last, tokens) for (_, last, _), tokens in zip(stretches, per_step, strict=True)][::-1]
        return Batches(tuple(mirrored)).steps_of(interval)

    def is_due(self, interval: Interval | None, step: int) -> bool:
        """Whether what happens every so often happens after `step` finished steps; never when it goes by the clock.

        In tokens that is the first step by which each multiple has been trained on.
        """
        if interval is None or interval.unit == "seconds":
            return False
        if interval.unit == "steps":
            return step % interval.amount == 0
        return self.tokens_before(step) // interval.amount > self.tokens_before(step - 1) // interval.amount

    def is_due_between(self, interval: Interval, step: int, end: int) -> bool:
        """Whether `is_due` after any step behind `step` and before `end`."""
        if interval.unit == "seconds":
            return False
        last = max(step, end - 1)
        if interval.unit == "steps":
            return last // interval.amount > step // interval.amount
        return self.tokens_before(last) // interval.amount > self.tokens_before(step) // interval.amount

    def in_words(self, steps: int) -> str:
        """The batches of a run: "64 rows from step 0, 128 rows from step 1,000"; with their length if that changes."""
        stretches = list(self.stretches(0, steps))
        several = len({self.length(first) for first, _, _ in stretches}) > 1
        return ", ".join(
            f"{rows} rows{f' of {self.length(first):,} tokens' if several else ''} from step {first:,}"
            for first, _, rows in stretches
        )

    def sum_in_words(self, steps: int) -> str:
        """Return the length of a run: "100 steps of 512 tokens", where they change those that there are at last."""
        tokens = self.parts[-1][1] * self.sequence_length
        since = self.parts[-1][0] if self.before is None else max(self.begins, self.parts[-1][0])
        changed = f" from step {since:,} on" if self.before is not None else ""
        return f"{steps:,} steps of {tokens:,} tokens{changed}"

    def _step_near(self, tokens: int, rounded: Callable[[int, int], int]) -> int:
        if self.before is not None and tokens <= self.before.tokens_before(self.begins):
            return self.before._step_near(tokens, rounded)
        for (first, rows), (end, _) in zip(self.parts, [*self.parts[1:], (None, 0)], strict=True):
            first = max(first, self.begins)
            if end is None or (end > self.begins and tokens <= self.tokens_before(end)):
                return first + rounded(tokens - self.tokens_before(first), rows * self.sequence_length)
        raise AssertionError("the last part has no end")

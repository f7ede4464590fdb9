"""The base of training feeds: a plan of rows, and the cut of a step's rows into lanes and micro-batches.

A step takes the next rows of an endless sequence (`headway.data.feeding.plan`), lane by lane and micro-batch by
micro-batch. So the rows of a step depend neither on the number of workers, nor on how a lane is cut into
micro-batches, nor on how far ahead batches are read.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from headway.core.errors import ConfigError
from headway.data.feeding.plan import Picks, RowPlan


class PlannedFeed:
    """The base of training feeds: a plan, and the cut of a step's rows into lanes and micro-batches.

    Args:
        plan: The rows of each step.
        lanes: Lanes of a step.
        micro_batch: Rows of a micro-batch, if a row is `row_tokens` long; of shorter rows it has more.
        row_tokens: Tokens per row, or 1.
    """

    def __init__(self, plan: RowPlan, lanes: int, micro_batch: int, row_tokens: int = 1) -> None:
        self.plan = plan
        self.lanes = lanes
        self._micro_tokens = micro_batch * row_tokens

    @property
    def rows(self) -> int:
        """Rows in one epoch of all sources, of the length at the start."""
        return sum(self.plan.epoch_rows(0))

    def picks(self, step: int, lane: int) -> list[Picks]:
        """Return the rows of one lane of one step, by micro-batch."""
        size = self.micro_batch(step)
        of_lane, rest = divmod(self.plan.step_rows(step), self.lanes)
        if rest:  # the run has rolled back into a segment whose steps had another number of rows
            raise ConfigError(
                f"the {self.plan.step_rows(step)} rows of step {step:,} cannot be cut into {self.lanes} lanes",
                where="train.lanes",
                fix=f"train.lanes={gcd(self.plan.step_rows(step), self.lanes)}",
            )
        picks = self.plan.picks(step, lane * of_lane, (lane + 1) * of_lane)
        return [picks[i : i + size] for i in range(0, len(picks), size)]

    def micro_batch(self, step: int) -> int:
        """Return the rows in a micro-batch of a step; the last micro-batch of a lane may have fewer."""
        # After a roll back, a step of an earlier segment may have longer rows than a micro-batch has tokens.
        return max(1, self._micro_tokens // self.plan.sequence_length(step))

    def rows_by_source(self, first_step: int, last_step: int) -> dict[str, int]:
        """Count the rows of each source that steps `first_step` to `last_step` (exclusive) consume."""
        return dict(zip(self.plan.sources, self.plan.counts(first_step, last_step), strict=True))

    def describe(self, last_step: int) -> dict[str, Any]:
        """Describe, as plain JSON, everything but the data that determines the rows of the steps before `last_step`."""
        return self.plan.describe(last_step)

    def longest_step(self, first: int, last: int) -> int:
        """Return the first of the steps `first` to `last` (exclusive) that has the longest rows."""
        starts = [start for start, _ in self.plan.stretches(first, last)]
        return max(starts, key=lambda step: (self.plan.sequence_length(step), -step))

    def metrics(self, step: int) -> dict[str, float]:
        """Return the data metrics of a step: the share of each source in its rows, and the epochs of each source."""
        plan = self.plan
        counts = self.plan.counts(step, step + 1)
        several = len(plan.sources) > 1
        shares = {f"data/share/{n}": c / sum(counts) for n, c in zip(plan.sources, counts, strict=True) if several}
        epochs = zip(plan.sources, plan.epochs(step), strict=True)
        return {**shares, **{f"data/epochs/{name}": value for name, value in epochs}}

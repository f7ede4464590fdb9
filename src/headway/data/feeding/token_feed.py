"""The training rows of a token store as batches: a pure function of (step, lane)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from headway.core.console import is_first_worker, warning
from headway.core.types import MicroBatch
from headway.data.feeding.micro_batches import micro_batch_of
from headway.data.feeding.packing import PackingFigures
from headway.data.feeding.plan import Picks, RowPlan
from headway.data.feeding.planned_feed import PlannedFeed
from headway.data.feeding.rows import RowBlock, padding_warning
from headway.data.feeding.segmented import SegmentedPlan, describe_rows, plan_of
from headway.data.feeding.split import SplitRows
from headway.data.feeding.training_rows import earlier_rows, training_rows
from headway.data.store import TokenStore

if TYPE_CHECKING:
    from headway.config import LaneGrid
    from headway.config.schema import RowSettings


class TokenFeed(PlannedFeed):
    """Training rows of a token store, all sources shuffled together.

    Args:
        rows: The rows of the store.
        plan: Which of them each step takes.
        grid: The cut of a step into lanes and micro-batches.
        sequence_length: Tokens per row for which the grid is made.
        earlier_rows: Opens the rows of an earlier segment by its number; None for a run that was never changed.
    """

    def __init__(
        self,
        rows: SplitRows,
        plan: RowPlan,
        grid: LaneGrid,
        *,
        sequence_length: int,
        earlier_rows: Callable[[int], SplitRows] | None = None,
    ) -> None:
        super().__init__(plan, grid.lanes, grid.micro_batch, sequence_length)
        self._rows = rows
        self._earlier_rows = earlier_rows
        self._opened: dict[int, SplitRows] = {}

    @classmethod
    def of(cls, settings: RowSettings, grid: LaneGrid, store: TokenStore) -> Self:
        """Open the feed of a resolved config's settings, with its mixture, packing and masks.

        Raises:
            ConfigError: Sources run out before the last step, or the config and the store have different sources.
            DataError: No source has enough tokens for one row, or a source with a weight has too few.
        """
        length = settings.train.sequence_length
        rows = training_rows(settings.data, length, store, settings.segments)
        earlier = partial(earlier_rows, settings.segments, store)
        return cls(rows, plan_of(settings, rows), grid, sequence_length=length, earlier_rows=earlier)

    @property
    def too_short(self) -> tuple[str, ...]:
        """Names of the store's sources that no step uses, since they do not fill a row."""
        return tuple(self._rows.too_short)

    def warn_of_short_sources(self) -> None:
        """Warn about sources that are too short to be used, if there are any."""
        if (text := self._rows.short_source_warning()) and is_first_worker():
            warning(text)

    def untrained_notice(self, length: int) -> str | None:
        """Return one line on rows of a length that are left out, since no token of them is trained, or None."""
        return self._rows.untrained_notice(length)

    def packing_figures(self, length: int) -> dict[str, PackingFigures]:
        """Return how each source's documents fill rows of a length, and warn about much padding."""
        figures = self._rows.figures(length)
        text = padding_warning(figures, length) if self._rows.packing == "best_fit" else None
        if text and is_first_worker():
            warning(text)
        return figures

    def describe(self, last_step: int) -> dict[str, Any]:
        """Describe, as plain JSON, all but the store that determines the rows of the steps before `last_step`."""
        return describe_rows(self.plan, self._rows, last_step)

    def batch(self, step: int, lane: int) -> list[MicroBatch]:
        """Read the micro-batches of one lane of one step: `ids` and `targets`, int64 (micro_batch, T) each.

        In a stage with rows of T / k tokens their shape is (micro_batch * k, T / k).
        """
        return [micro_batch_of(self.read(step, picks)) for picks in self.picks(step, lane)]

    def read(self, step: int, picks: Picks) -> RowBlock:
        """Read some rows of a step."""
        plan = self.plan
        length = self.plan.sequence_length(step)
        if not isinstance(plan, SegmentedPlan):
            return self._rows.read(length, picks.sources, picks.rows)
        return self._rows_of(plan.number_at(step)).read(length, plan.own_sources(step, picks.sources), picks.rows)

    def _rows_of(self, segment: int) -> SplitRows:
        """Return the rows of a segment; those of an earlier segment (after a roll back) are opened on first use."""
        assert isinstance(self.plan, SegmentedPlan) and self._earlier_rows is not None, "a run that was changed"
        if segment == len(self.plan.plans) - 1:
            return self._rows
        if segment not in self._opened:
            self._opened[segment] = self._earlier_rows(segment)
        return self._opened[segment]

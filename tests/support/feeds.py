"""What tests of feeds share: the training rows of a store, and a preview of them."""

from __future__ import annotations

from headway.config import Config, LaneGrid
from headway.config.batches import Batches
from headway.data.feeding.plan import PlainPlan
from headway.data.feeding.preview import StepView, preview_step
from headway.data.feeding.split import SplitRows
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore


def plain_feed(
    store: TokenStore,
    *,
    split: str = "train",
    sequence_length: int,
    seed: int,
    lanes: int,
    micro_batches: int,
    micro_batch: int,
) -> TokenFeed:
    """All rows of a split, shuffled together."""
    rows = SplitRows(store, split, sequence_length)
    grid = LaneGrid(lanes, micro_batches, micro_batch)
    batches = Batches(((0, lanes * micro_batches * micro_batch),), sequence_length)
    plan = PlainPlan(rows.sources, rows.counts(sequence_length), seed, batches, sequence_length)
    return TokenFeed(rows, plan, grid, sequence_length=sequence_length)


def preview(config: Config, grid: LaneGrid, store: TokenStore, step: int, rows: int | None = None) -> StepView:
    """A step of the run of a config."""
    feed = TokenFeed.of(config.row_settings, grid, store)
    return preview_step(feed, store, config.data.packing, config.train.steps or 0, step=step, rows=rows)

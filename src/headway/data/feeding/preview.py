"""A preview of a step: its rows, their sources, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError
from headway.data.feeding.plan import MixedPlan, Picks, RowPlan
from headway.data.feeding.segmented import SegmentedPlan
from headway.data.feeding.token_feed import TokenFeed
from headway.data.store import TokenStore
from headway.data.tokenizing.tokenizer import Tokenizer

# Limit on the rows to count for the shares before the step; above it, these shares stay unknown.
_MAX_COUNTED_ROWS = 50_000_000


@dataclass(frozen=True)
class SourceView:
    """One source as a step sees it."""

    name: str
    asked: float
    """Its share by the config."""
    step: float
    """Its share of the step's rows."""
    so_far: float | None
    """Its share of the rows up to the step's end, since the row length last changed; None if counting them would take
    too long."""
    epochs: float
    """Its epochs by the step's end, since the row length last changed."""


@dataclass(frozen=True)
class RowView:
    """One row. Numbers are counted from 0."""

    lane: int
    micro_batch: int
    row: int
    """Within the micro-batch."""
    source: str
    epoch: int
    source_row: int
    """Within the source."""
    first_token: int | None
    """Where the row begins in the source's tokens; None for packed rows, which begin at several places, and for a run
    to which data was added."""
    padding: int
    """Tokens at its end that belong to no document."""
    documents: list[str]
    """The text of the row with special tokens, cut where a document ends; the end-of-text token is omitted."""
    ids: list[int]
    """The input tokens, (T,)."""
    trained: list[bool] | None = None
    """Whether each input token is trained as a target, (T,); None if the source has no loss mask."""
    marked: list[str] | None = None
    """`documents` with what is trained between ⟦ and ⟧; None without a loss mask."""


@dataclass(frozen=True)
class StepView:
    """One step."""

    step: int
    steps: int
    sequence_length: int
    lanes: int
    micro_batches: int
    micro_batch: int
    first_step: int
    """The first step for which the asked shares hold."""
    last_step: int
    """The step after the last one for which the asked shares hold."""
    sources: list[SourceView]
    rows: list[RowView]


def preview_step(
    feed: TokenFeed, store: TokenStore, packing: str, steps: int, *, step: int, rows: int | None = None
) -> StepView:
    """Preview a step of a run.

    Args:
        feed: The run's.
        store: Its store.
        packing: `data.packing`.
        steps: The run's.
        step: The step, counted from 0.
        rows: Number of rows of each lane to show, from its first on; all when None.

    Raises:
        ConfigError: The run has no such step.
        DataError: The store cannot be read.
    """
    if not 0 <= step < steps:
        raise ConfigError(f"the run has no step {step:,}", where="train.steps", fix=f"--step 0 to --step {steps - 1}")
    length = feed.plan.sequence_length(step)
    plan = _plan_at(feed.plan, step)
    first = 0
    last = steps
    if isinstance(feed.plan, SegmentedPlan):
        first, last = feed.plan.borders(step, steps)
    if isinstance(plan, MixedPlan):
        segment = plan.mixture.segment_at(step)
        first = max(first, segment.first_step)
        last = min(last, segment.last_step)
    feed.warn_of_short_sources()
    reader = _RowReader(packing, store, feed, step)
    left_out = [SourceView(name, asked=0.0, step=0.0, so_far=0.0, epochs=0.0) for name in feed.too_short]
    return StepView(
        step=step,
        steps=steps,
        sequence_length=length,
        lanes=feed.lanes,
        micro_batches=len(feed.picks(step, 0)),
        micro_batch=feed.micro_batch(step),
        first_step=first,
        last_step=last,
        sources=[*_sources(feed.plan, step), *left_out],
        rows=[view for lane in range(feed.lanes) for view in reader.lane(lane, rows)],
    )


def _plan_at(plan: RowPlan, step: int) -> RowPlan:
    """Return the plan that determines a step's rows, also in a run that was changed midway."""
    return plan.plan_at(step) if isinstance(plan, SegmentedPlan) else plan


def _sources(plan: RowPlan, step: int) -> list[SourceView]:
    in_step = plan.counts(step, step + 1)
    epochs = plan.epochs(step)
    rows = plan.epoch_rows(step)
    asked = [count / sum(rows) for count in rows]
    so_far = None
    here = _plan_at(plan, step)
    if isinstance(here, MixedPlan):
        shares = dict(zip(here.sources, here.mixture.segment_at(step).shares, strict=True))
        asked = [float(shares.get(name, 0)) for name in plan.sources]
    counted = min(sum(rows), (step + 1) * plan.step_rows(step))
    if len(rows) == 1 or isinstance(plan, MixedPlan) or counted <= _MAX_COUNTED_ROWS:
        so_far = plan.counts(plan.begun(step), step + 1)
    return [
        SourceView(
            name=name,
            asked=asked[number],
            step=in_step[number] / sum(in_step),
            so_far=so_far[number] / sum(so_far) if so_far else None,
            epochs=epochs[number],
        )
        for number, name in enumerate(plan.sources)
    ]


class _RowReader:
    def __init__(self, packing: str, store: TokenStore, feed: TokenFeed, step: int) -> None:
        self._feed = feed
        self._step = step
        self._end_of_text = store.end_of_text_id
        segment = feed.plan.segments[feed.plan.number_at(step)] if isinstance(feed.plan, SegmentedPlan) else None
        # Each of several parts of a source is cut into rows separately, so a row's number does not give its place.
        self._packed = (packing if segment is None else segment.packing) != "concat"
        self._packed |= segment is not None and len(segment.shards) > 0
        self._tokenizer = Tokenizer.load(store.tokenizer_folder)

    def lane(self, lane: int, rows: int | None) -> list[RowView]:
        views: list[RowView] = []
        for number, picks in enumerate(self._feed.picks(self._step, lane)):
            wanted = picks[: None if rows is None else rows - len(views)]
            if not len(wanted):
                break
            views += self._micro_batch(lane, number, wanted)
        return views

    def _micro_batch(self, lane: int, number: int, picks: Picks) -> list[RowView]:
        block = self._feed.read(self._step, picks)
        length = self._feed.plan.sequence_length(self._step)
        views = []
        for row, tokens in enumerate(block.tokens[:, :-1]):
            documents = None if block.documents is None else block.documents[row, :-1]
            trained = None if block.trained is None else block.trained[row, :-1]
            if documents is None:
                text = tokens
                ends = np.flatnonzero(tokens == self._end_of_text) + 1
            else:
                text = tokens[documents >= 0]
                ends = np.flatnonzero(np.diff(documents[documents >= 0])) + 1
            parts = [part for part in np.split(np.arange(len(text)), ends) if len(part)]
            source_row = int(picks.rows[row])
            views.append(
                RowView(
                    lane=lane,
                    micro_batch=number,
                    row=row,
                    source=self._feed.plan.sources[int(picks.sources[row])],
                    epoch=int(picks.epochs[row]),
                    source_row=source_row,
                    first_token=None if self._packed else source_row * length,
                    padding=len(tokens) - len(text),
                    documents=[self._text(text[part]) for part in parts],
                    ids=tokens.tolist(),
                    trained=None if trained is None else trained.tolist(),
                    marked=None if trained is None else [self._marked(text[part], trained[part]) for part in parts],
                )
            )
        return views

    def _marked(self, ids: NDArray[np.integer[Any]], trained: NDArray[np.bool_]) -> str:
        borders = np.flatnonzero(np.diff(trained)) + 1
        pieces = zip(np.split(ids, borders), np.split(trained, borders), strict=True)
        return "".join(f"⟦{self._text(some)}⟧" if bits[0] else self._text(some) for some, bits in pieces)

    def _text(self, ids: NDArray[np.integer[Any]]) -> str:
        ended = ids[-1] == self._end_of_text
        return self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)

"""Batches as a pure function of (step, lane), from a token store or from any map-style dataset.

A step takes the next rows of an endless sequence (`headway.data.feeding.plan`), lane by lane and micro-batch by
micro-batch. So the rows of a step depend neither on the number of workers, nor on how a lane is cut into
micro-batches, nor on how far ahead batches are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from torch.utils.data import default_collate

from headway.config.batches import Batches
from headway.config.sections.data import DataConfig, sources_of_role
from headway.core.console import is_first_worker, warning
from headway.core.errors import ConfigError, DataError
from headway.core.types import MicroBatch
from headway.data.feeding.packing import PackingFigures
from headway.data.feeding.plan import Picks, PlainPlan, RowPlan
from headway.data.feeding.prefetch import Prefetcher
from headway.data.feeding.rows import RowBlock, micro_batch_of, padding_warning
from headway.data.feeding.segmented import SegmentedPlan, plan_of
from headway.data.feeding.split import SplitRows
from headway.data.shards import documents_of
from headway.data.store import TokenStore

if TYPE_CHECKING:
    from headway.config import Config, LaneGrid
    from headway.config.sections.segments import Segment

__all__ = ["TokenFeed", "EvaluationFeed", "evaluation_feed", "DatasetFeed", "DatasetEvaluationFeed", "Prefetcher"]


#: Name of the only source of a run on a map-style dataset.
DATASET = "dataset"


class _PlannedFeed:
    """The base of training feeds: a plan, and the cut of a step's rows into lanes and micro-batches.

    Args:
        plan: The rows of each step.
        lanes: Lanes of a step.
        micro_batch: Rows of a micro-batch, if a row is `row_tokens` long; of shorter rows it has more.
        row_tokens: Tokens per row, or 1.
    """

    def __init__(self, plan: RowPlan, lanes: int, micro_batch: int, row_tokens: int = 1) -> None:
        self.plan = plan
        self._lanes, self._micro_tokens = lanes, micro_batch * row_tokens

    @property
    def rows(self) -> int:
        """Rows in one epoch of all sources, of the length at the start."""
        return sum(self.plan.epoch_rows(0))

    def picks(self, step: int, lane: int) -> list[Picks]:
        """Return the rows of one lane of one step, by micro-batch."""
        size = self.micro_batch(step)
        of_lane, rest = divmod(self.plan.step_rows(step), self._lanes)
        if rest:  # the run has rolled back into a segment whose steps had another number of rows
            raise ConfigError(
                f"the {self.plan.step_rows(step)} rows of step {step:,} cannot be cut into {self._lanes} lanes",
                where="train.lanes",
                fix=f"train.lanes={gcd(self.plan.step_rows(step), self._lanes)}",
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
        plan, counts = self.plan, self.plan.counts(step, step + 1)
        several = len(plan.sources) > 1
        shares = {f"data/share/{n}": c / sum(counts) for n, c in zip(plan.sources, counts, strict=True) if several}
        epochs = zip(plan.sources, plan.epochs(step), strict=True)
        return {**shares, **{f"data/epochs/{name}": value for name, value in epochs}}


class TokenFeed(_PlannedFeed):
    """Training rows of a token store, all sources shuffled together.

    Args:
        store: The store.
        split: Name of the split.
        sequence_length: Tokens per row, T.
        seed: Seed of the run; it determines the order of rows.
        lanes: Lanes of a step.
        micro_batches: Micro-batches of a lane.
        micro_batch: Rows of a micro-batch.

    Raises:
        DataError: No source has enough tokens for one row.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        split: str = "train",
        sequence_length: int,
        seed: int,
        lanes: int,
        micro_batches: int,
        micro_batch: int,
    ) -> None:
        rows = SplitRows(store, split, sequence_length)
        batches = Batches(((0, lanes * micro_batches * micro_batch),), sequence_length)
        plan = PlainPlan(rows.sources, rows.counts(sequence_length), seed, batches, sequence_length)
        self._start(rows, plan, lanes, micro_batch, sequence_length)

    @classmethod
    def of(cls, config: Config, grid: LaneGrid, store: TokenStore) -> Self:
        """Open the feed of a resolved config, with its mixture, packing and masks.

        Raises:
            ConfigError: Sources run out before the last step, or the config and the store have different sources.
            DataError: No source has enough tokens for one row, or a source with a weight has too few.
        """
        feed, rows = cls.__new__(cls), training_rows(config, store)
        feed._start(rows, plan_of(config, rows), grid.lanes, grid.micro_batch, config.train.sequence_length)
        feed._earlier_rows = partial(earlier_rows, config, store)
        return feed

    def _start(self, rows: SplitRows, plan: RowPlan, lanes: int, micro_batch: int, length: int) -> None:
        super().__init__(plan, lanes, micro_batch, length)
        self._rows = rows
        self._opened: dict[int, SplitRows] = {}
        self._earlier_rows: Callable[[int], SplitRows] | None = None

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
        plan, length = self.plan, self.plan.sequence_length(step)
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


def describe_rows(plan: RowPlan, rows: SplitRows, last_step: int) -> dict[str, Any]:
    """Return the description that `TokenFeed.describe` gives."""
    packing, document_mask = rows.packing, rows.document_mask
    if isinstance(plan, SegmentedPlan):
        segment = plan.segments[plan.number_at(max(0, last_step - 1))]
        packing, document_mask = segment.packing, segment.document_mask
    return {**plan.describe(last_step), "packing": packing, "document_mask": document_mask}


def row_lengths(data: DataConfig, sequence_length: int) -> list[int]:
    """List all row lengths of a run whose first stage has rows of `sequence_length` tokens."""
    stages = [stage.sequence_length for stage in data.mixture.stages]
    return list(dict.fromkeys([sequence_length, *(length for length in stages if length)]))


def training_rows(config: Config, store: TokenStore) -> SplitRows:
    """Open the training rows of a store, in all row lengths of a resolved config."""
    parts: Sequence[TokenStore] = [store]
    if config.segments:
        parts = store_parts(store, config.segments[-1])
    return _split_rows(config, parts)


def earlier_rows(config: Config, store: TokenStore, number: int) -> SplitRows:
    """Open the training rows of an earlier segment.

    Raises:
        DataError: The store no longer has that segment's data.
    """
    segments = config.segments
    parts = store_parts(store, segments[-1])
    for earlier, later in reversed([*pairwise(segments[number:])]):
        if earlier.data == later.data:
            continue
        if len(later.shards) <= len(earlier.shards):
            raise DataError(
                f"the data of the steps before {later.first_step:,} is not in the token store any more",
                where=str(store.path),
                fix="restore the token store that the run had then",
            )
        parts = parts[: len(earlier.shards) + 1]
    return _split_rows(config.of_segment(number), parts)


def _split_rows(config: Config, parts: Sequence[TokenStore]) -> SplitRows:
    data, lengths = config.data, row_lengths(config.data, config.train.sequence_length)
    return SplitRows([*parts], "train", *lengths, packing=data.packing, document_mask=data.document_mask)


def store_parts(store: TokenStore, segment: Segment) -> list[TokenStore]:
    """Return a segment's data, part by part in the order in which the parts were added.

    Args:
        store: The store, with the manifest at the segment's start.
        segment: The segment.

    Raises:
        DataError: The store lacks a shard.
    """
    if not segment.shards:
        return [store]
    used: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for part in segment.shards:
        for source, references in part.items():
            for file, *documents in (reference.split(":") for reference in references):
                first, end = map(int, documents or (0, sys.maxsize))
                used.setdefault((source, file), []).append((first, end))
    last = {
        source: [
            reference
            for shard in store.shard_entries("train", source)
            for reference in _unused(shard, used.get((source, shard["file"]), ()))
        ]
        for source in store.sources("train")
    }
    parts = [*segment.shards, {source: references for source, references in last.items() if references}]
    return [store.with_shards("train", part) for part in parts]


def _unused(shard: Mapping[str, Any], used: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield references to the documents of a shard that no range in `used` covers."""
    place = 0
    for first, end in [*sorted(used), (shard["documents"], shard["documents"])]:
        if place < min(first, shard["documents"]):
            yield documents_of(shard, place, first)
        place = max(place, end)


class EvaluationFeed:
    """The held-out rows of every evaluation, evenly spaced over a split.

    Args:
        store: The store.
        split: Name of the split.
        sequence_length: Tokens per row, T.
        limit: Maximum number of rows; all when None.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        packing: `data.packing`.
        document_mask: `data.document_mask`.
        parts: Number of equal parts into which workers cut every row.
        only: Names of sources; the others are omitted.

    Tokens at a source's end that do not fill a row are omitted. If no source fills a row, the longest one gives one
    shorter row, so that a tiny split can still be evaluated.

    Raises:
        DataError: The split has fewer than two tokens, or too few for a row that can be cut.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        split: str = "validation",
        sequence_length: int,
        limit: int | None = None,
        micro_batch: int,
        packing: Literal["concat", "best_fit", "pad"] = "concat",
        document_mask: bool = False,
        parts: int = 1,
        only: Collection[str] | None = None,
    ) -> None:
        names = [name for name in store.sources(split) if only is None or name in only]
        longest = max((store.tokens(split, name) for name in names), default=0)
        if longest < 2:
            of = "" if only is None else f" of {', '.join(sorted(only))}"
            raise DataError(
                f"split '{split}' holds no text{of} to evaluate on", where=str(store.path), fix="raise data.validation"
            )
        if longest <= parts:
            raise DataError(
                f"split '{split}' is too short to evaluate on: the longest source has {longest:,} tokens, and rows are"
                f" cut into {parts} parts",
                where=str(store.path),
                fix="raise data.validation, or lower parallel.context or parallel.tensor",
            )
        length = min(sequence_length, longest - 1)
        self._length, self._micro_batch = length - length % parts, micro_batch
        self._rows = SplitRows(store, split, self._length, packing=packing, document_mask=document_mask, only=only)
        self._starts = np.cumsum([0, *self._rows.counts(self._length)])
        self._total = int(self._starts[-1])
        self.rows = self._total if limit is None else min(limit, self._total)
        """Rows of one evaluation."""

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return -(-self.rows // self._micro_batch)

    def batch(self, index: int) -> MicroBatch:
        """Read micro-batch `index`: `ids` and `targets`, int64 (rows, T) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        places = range(index * self._micro_batch, min((index + 1) * self._micro_batch, self.rows))
        chosen = np.array([place * self._total // self.rows for place in places], dtype=np.int64)
        sources = np.searchsorted(self._starts, chosen, side="right") - 1
        return micro_batch_of(self._rows.read(self._length, sources, chosen - self._starts[sources]))


class EvaluationWithReplay:
    """The held-out rows of the sources to learn from, followed by those of the replayed ones.

    Args:
        own: Rows of the sources to learn from.
        replay: Rows of the replayed ones.
    """

    def __init__(self, own: EvaluationFeed, replay: EvaluationFeed) -> None:
        self._own, self._replay = own, replay

    @property
    def replay_from(self) -> int:
        """Number of the first micro-batch of replayed sources."""
        return len(self._own)

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return len(self._own) + len(self._replay)

    def batch(self, index: int) -> MicroBatch:
        """Read micro-batch `index`."""
        first = self.replay_from
        return self._own.batch(index) if index < first else self._replay.batch(index - first)


def evaluation_feed(
    data: DataConfig,
    store: TokenStore,
    *,
    split: str = "validation",
    sequence_length: int,
    limit: int | None,
    micro_batch: int,
    parts: int = 1,
) -> EvaluationFeed | EvaluationWithReplay:
    """Open the rows that evaluations use: those of replayed sources by themselves, if there are any.

    Args:
        data: The config of the run.
        store, split, sequence_length, limit, micro_batch, parts: As in `EvaluationFeed`; the limit is for each role.

    Raises:
        DataError: A role has too little text to evaluate on.
    """

    def opened(only: Collection[str] | None) -> EvaluationFeed:
        return EvaluationFeed(
            store,
            split=split,
            sequence_length=sequence_length,
            limit=limit,
            micro_batch=micro_batch,
            packing=data.packing,
            document_mask=data.document_mask,
            parts=parts,
            only=only,
        )

    replayed = set(sources_of_role(data.sources, "replay"))
    if not replayed & {source["name"] for source in store.manifest["sources"]}:
        return opened(None)
    others = {source["name"] for source in store.manifest["sources"]} - replayed
    return EvaluationWithReplay(opened(others), opened(replayed))


def dataset_plan(config: Config, rows: int) -> RowPlan:
    """Make the plan of a resolved config for a map-style dataset with so many rows.

    Raises:
        DataError: The dataset is empty.
    """
    if not rows:
        raise DataError("the dataset has no rows", where=DATASET, fix="give it at least one")
    if config.segments:
        return SegmentedPlan(config)
    return PlainPlan([DATASET], [rows], config.seed, config.train.batches)


class DatasetFeed(_PlannedFeed):
    """Rows of any map-style dataset: an object with `__len__` and `__getitem__` that is a pure function of the index.

    Args:
        dataset: The dataset.
        plan: The rows of each step.
        lanes: Lanes of a step.
        micro_batch: Rows of a micro-batch.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.
    """

    def __init__(
        self,
        dataset: Any,
        plan: RowPlan,
        *,
        lanes: int,
        micro_batch: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(plan, lanes, micro_batch)
        self._dataset, self._collate = dataset, collate or default_collate

    def batch(self, step: int, lane: int) -> Sequence[Any]:
        """Return the micro-batches of one lane of one step, as `collate` makes them."""
        return [self._collate([self._dataset[i] for i in p.rows.tolist()]) for p in self.picks(step, lane)]


class DatasetEvaluationFeed:
    """All rows of a map-style dataset, in order.

    Args:
        dataset: The dataset.
        micro_batch: Rows of a micro-batch; the last one may have fewer.
        collate: Makes a micro-batch from a list of rows; torch's default when not given.
    """

    def __init__(self, dataset: Any, *, micro_batch: int, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._dataset, self._micro_batch, self._collate = dataset, micro_batch, collate or default_collate

    def __len__(self) -> int:
        """Return the number of micro-batches in one evaluation."""
        return -(-len(self._dataset) // self._micro_batch)

    def batch(self, index: int) -> Any:
        """Return micro-batch `index`, as `collate` makes it."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        start = index * self._micro_batch
        end = min(start + self._micro_batch, len(self._dataset))
        return self._collate([self._dataset[row] for row in range(start, end)])

"""How a run continues when its config or its data have changed since its newest checkpoint.

Nothing is written here: the result is a config with segments (`headway.config.sections.segments`), from which all else
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headway.config import Config, changes, load_resolved
from headway.config.sections.segments import PartRows, Segment
from headway.core.console import notice, warning
from headway.core.errors import DataError
from headway.data.feeding.continuation import START_EPOCH
from headway.data.feeding.segmented import DATASET, SegmentedPlan
from headway.data.feeding.split import SplitRows
from headway.data.feeding.training_rows import row_lengths, store_parts
from headway.data.growth import Lost, locate
from headway.data.pinned import pinned
from headway.data.store import TokenStore
from headway.data.used_by import kept_manifest
from headway.run.directory.beginning import config_at_beginning
from headway.run.directory.ledger import Ledger
from headway.run.directory.run_directory import RunDirectory
from headway.run.session.attempt import ACCEPT, RunOptions, check_changes, counted_for, newest_manifest


@dataclass(frozen=True)
class Joined:
    """Data that a run continues with."""

    rows: PartRows
    shards: Sequence[Mapping[str, Sequence[str]]] = ()
    words: str = ""
    """Description of the new data."""


@dataclass(frozen=True)
class StoreData:
    """The token store that a run would be trained on."""

    config: Config
    store: TokenStore

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the manifest."""
        return self.store.fingerprint

    def rows(self, config: Config, data: str) -> PartRows | None:
        """Return the rows of data with a fingerprint, as one part, by its manifest; None if neither the store nor the
        run directory has that."""
        store = self._known(data)
        return None if store is None else part_rows(config, [store])

    def is_there(self, data: str) -> bool:
        """Return whether data with a fingerprint can be read: the run has kept the manifest, and the store all its
        shards."""
        with suppress(DataError):
            pinned(self.store, self.config.run_directory, data)
            return True
        return False

    def grown(self, config: Config, last: Segment) -> Joined:
        """Return the parts that the segment knows, and all other data as one more part.

        Raises:
            DataError: not all data that the segment knows is there.
        """
        known = self._known(last.data)
        if known is None:
            raise _lost(self.fingerprint, last, "the run has not kept its manifest", str(self.store.path))
        if known.tokenizer_fingerprint != self.store.tokenizer_fingerprint:
            raise _lost(self.fingerprint, last, "it was encoded with another tokenizer", str(self.store.path))
        try:
            parts = locate(store_parts(known, last), self.store, "train")
        except Lost as lost:
            raise _lost(
                self.fingerprint, last, f"{lost} are no longer in the token store", str(self.store.path)
            ) from None
        except DataError as error:
            raise _lost(self.fingerprint, last, error.what, error.where or str(self.store.path)) from None
        segment = last.model_copy(update={"shards": parts})
        rows = part_rows(config, store_parts(self.store, segment))
        return Joined(rows, parts, _joined(last, rows, config.train.sequence_length))

    def _known(self, data: str) -> TokenStore | None:
        if self.store.fingerprint == data:
            return self.store
        manifest = kept_manifest(self.config.run_directory, data)
        return None if manifest is None else self.store.with_manifest(manifest)


@dataclass(frozen=True)
class DatasetData:
    """The map-style dataset that a run would be trained on; it grows at its end."""

    count: int
    fingerprint: str
    fingerprint_of: Callable[[int], str]
    ledger: Ledger

    def rows(self, config: Config, data: str) -> PartRows | None:
        """Return the number of rows that the dataset has, or had according to the ledger."""
        known = [self.count, *(commit.epoch_rows or 0 for commit in self.ledger.commits())]
        found = next((count for count in known if count and self.fingerprint_of(count) == data), None)
        return None if found is None else {DATASET: {1: [found]}}

    def is_there(self, data: str) -> bool:
        """Return whether the dataset is unchanged: a changed one is another."""
        return data == self.fingerprint

    def grown(self, config: Config, last: Segment) -> Joined:
        """Return the rows that were appended after those that the segment knows.

        Raises:
            DataError: there are fewer than it knows.
        """
        known = last.rows[DATASET][1]
        more = self.count - sum(known)
        if more < 0:
            raise _lost(self.fingerprint, last, f"the dataset has {-more:,} fewer rows", DATASET)
        rows = {DATASET: {1: [*known, more]}}
        return Joined(rows, [{}] * len(known), f"{more:,} more rows of '{DATASET}'")


RunData = StoreData | DatasetData


def _lost(now: str, last: Segment, why: str, where: str) -> DataError:
    return DataError(
        f"the data fingerprint is {now[:12]}, and what the run has used ({last.data[:12]}) is not all in it: {why}",
        where=where,
        fix=f"restore the data that the run had; or {ACCEPT} {START_EPOCH} begins an epoch of all that is there now",
    )


def part_rows(config: Config, parts: Sequence[TokenStore]) -> PartRows:
    """Count the rows of every part of some data, by source and row length."""
    data = config.data
    lengths = row_lengths(data.mixture, config.train.sequence_length)
    split = SplitRows(list(parts), "train", *lengths, packing=data.packing, document_mask=data.document_mask)
    return {name: {n: split.counts_by_part(name, n) for n in lengths} for name in split.sources}


def settle_segments(config: Config, data: RunData, options: RunOptions, tokenizer: str | None = None) -> Config:
    """Return the config that the run continues with: with segments if the run has changed or is changing.

    Args:
        config: Resolved, as the user wants it now.
        data: The current data.
        options: What the user accepts.
        tokenizer: Fingerprint of the data's tokenizer.

    Raises:
        ConfigError: something has changed that was not accepted, or cannot change.
        DataError: the data have changed in such a way.
    """
    run = RunDirectory(config.run_directory)
    if not options.restart:
        check_changes(run, config, options)
    here = None if options.restart or not run.config_path.exists() else newest_manifest(run)
    if here is None or not here[0]:
        return config.with_segments([])
    step, context = here
    old = load_resolved(run.config_path)
    config = counted_for(config, old, step)
    if tokenizer is not None and context.get("tokenizer") not in (None, tokenizer):
        raise DataError(
            f"the tokenizer fingerprint is {tokenizer[:12]}, but checkpoint step-{step:08d} was made with"
            f" {context['tokenizer'][:12]}: its ids would mean other text",
            where=str(run.path),
            fix="restore the token store it was made with, or choose another name=... for a new run",
        )
    is_dataset = isinstance(data, DatasetData)
    segments = [_as_dataset(s, old) if is_dataset else s for s in old.segments]
    began = str(context.get("data", data.fingerprint))
    if not segments:
        rows = data.rows(old, began)
        if rows is None:
            if began == data.fingerprint:
                return config.with_segments([])
            raise DataError(
                f"the data fingerprint is {data.fingerprint[:12]}, but the run was made with {began[:12]}, of which it"
                " has kept no manifest",
                where=str(run.path),
                fix="restore the data that the run had, or choose another name=... for a new run",
            )
        first = old.begin_segment(0, began, rows)
        segments = [_as_dataset(first, old) if is_dataset else first]
    last = segments[-1]
    joins = data.fingerprint != segments[-1].data
    if joins and not options.accept_changes:
        if not data.is_there(last.data):
            raise DataError(
                f"the data has changed: its fingerprint is {data.fingerprint[:12]}, and the run continues from step"
                f" {step:,} with {last.data[:12]}, which is no longer complete",
                where=str(run.path),
                fix=f"run the same command with {ACCEPT} to continue with the current data, restore the data"
                " that the run had, or choose another name=... for a new run",
            )
        warning(
            f"the data has changed since the run began (now {data.fingerprint[:12]}): the run continues with what it"
            f" had ({last.data[:12]}); {ACCEPT} adds the new data from step {step:,} on"
        )
        joins = False
    kept = [segment for segment in segments if segment.first_step < step]
    begun_with = config_at_beginning(run, step)
    differences = changes(begun_with or old, config)
    wanted = _wanted_segment(
        config, step, last, data, joins=joins, new_epoch=options.start_epoch, is_dataset=is_dataset
    )
    epoch_continues = last.new_epoch and not joins and _same_epoch(config, segments, step)
    if options.start_epoch and epoch_continues:
        notice(f"the epoch that {START_EPOCH} began at step {last.first_step:,} continues")
    begins = options.start_epoch and not epoch_continues
    # What a run changes where it begins from another one's checkpoint is a segment, whether it moves rows or not.
    is_other = begun_with is not None and bool(differences)
    if not joins and not begins and not is_other and wanted.plans_as(last):
        if not old.segments and last.data == data.fingerprint:
            return config.with_segments([])
        return config.with_segments([*segments[:-1], last.model_copy(update={"steps": wanted.steps})])
    if not joins and not begins and not is_other and kept and wanted.plans_as(kept[-1]):
        return config.with_segments([*kept[:-1], kept[-1].model_copy(update={"steps": wanted.steps})])
    words = [*differences, *([wanted.changes[0]] if joins else [])]
    words += [f"{START_EPOCH}: an epoch of all data begins"] if begins else []
    begun = wanted.model_copy(update={"new_epoch": begins, "changes": words})
    result = config.with_segments([*kept, begun])
    plan = SegmentedPlan(result.segments, result.segment_sections)  # raises an error if the run cannot continue so
    if joins:
        warning(f"the run continues with changed data: {wanted.changes[0]}")
    notice(_describe_rows(plan, step, joins))
    return result


def _as_dataset(segment: Segment, config: Config) -> Segment:
    """Adapt a segment to a dataset, whose rows have no length but count as `train.sequence_length` tokens."""
    tokens = segment.row_tokens or config.train.sequence_length
    return segment.model_copy(update={"sequence_length": 1, "row_tokens": tokens})


def _wanted_segment(
    config: Config, step: int, last: Segment, data: RunData, *, joins: bool, new_epoch: bool, is_dataset: bool
) -> Segment:
    """Return the segment that the config would begin at a step."""
    if not joins:
        rows = _recount(config, last, data)
        segment = config.begin_segment(step, last.data, rows, shards=last.shards)
        return _as_dataset(segment, config) if is_dataset else segment
    try:
        joined = data.grown(config, last)
    except DataError:
        rows_anew = data.rows(config, data.fingerprint)
        if not new_epoch or rows_anew is None:
            raise
        joined = Joined(rows_anew, (), "other data")
    words = f"data was {last.data[:12]} and is now {data.fingerprint[:12]}" + (
        f": {joined.words}" if joined.words else ""
    )
    segment = config.begin_segment(step, data.fingerprint, joined.rows, shards=joined.shards, changes=[words])
    return _as_dataset(segment, config) if is_dataset else segment


def _recount(config: Config, last: Segment, data: RunData) -> PartRows:
    """Count the rows of unchanged data for a config that may have other lengths or another packing."""
    if isinstance(data, DatasetData):
        return last.rows
    store = pinned(data.store, config.run_directory, last.data)
    return part_rows(config, store_parts(store, last))


def _same_epoch(config: Config, segments: Sequence[Segment], step: int) -> bool:
    """Return whether the epoch that the last segment began is still in progress."""
    plan = SegmentedPlan(segments, config.with_segments(segments).segment_sections)
    first = segments[-1].first_step
    return step <= first or int(max(plan.epochs(step - 1))) == int(max(plan.epochs(first)))


def _joined(last: Segment, rows: PartRows, length: int) -> str:
    """Describe the data that has joined."""
    parts = []
    for name, of in rows.items():
        before = sum(map(sum, [last.rows.get(name, {}).get(length, [])]))
        more = sum(of.get(length, [])) - before
        if name not in last.rows:
            parts.append(f"'{name}' is new with {more:,} rows of {length} tokens")
        elif more:
            parts.append(f"'{name}' has {more:,} more rows")
    return ", ".join(parts)


def _describe_rows(plan: SegmentedPlan, step: int, joins: bool) -> str:
    """Describe in one line how the rows continue."""
    border = plan.border(step) if step in plan.firsts else None
    rows = plan.step_rows(step)
    length = plan.sequence_length(step)
    of_tokens = f" of {length:,} tokens" if length > 1 else ""
    head = f"from step {step:,} on: {rows:,} rows{of_tokens} a step"
    if border is None:
        return head
    if border.row_map is None:
        return f"{head}; an epoch of all data begins"
    fresh = sum(count for _, _, count in border.row_map.fresh)
    more = f", {fresh:,} more rows than before" if joins and fresh else ""
    return f"{head}; the epoch continues with its remaining rows{more}"

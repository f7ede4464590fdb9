"""The training rows of a token store, as the segments of a run cut them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headway.config.sections.data import DataConfig, MixtureConfig
from headway.core.errors import DataError
from headway.data.feeding.split import SplitRows
from headway.data.shards import documents_of
from headway.data.store import TokenStore

if TYPE_CHECKING:
    from headway.config.sections.segments import Segment


def row_lengths(mixture: MixtureConfig, sequence_length: int) -> list[int]:
    """List all row lengths of a run whose first stage has rows of `sequence_length` tokens."""
    stages = [stage.sequence_length for stage in mixture.stages]
    return list(dict.fromkeys([sequence_length, *(length for length in stages if length)]))


def training_rows(
    data: DataConfig, sequence_length: int, store: TokenStore, segments: Sequence[Segment] = ()
) -> SplitRows:
    """Open the training rows of a store, in all row lengths of a run.

    Args:
        data: Of a resolved config.
        sequence_length: `train.sequence_length`.
        segments: Of the run; the last one is current.
    """
    parts = store_parts(store, segments[-1]) if segments else [store]
    lengths = row_lengths(data.mixture, sequence_length)
    return SplitRows(parts, "train", *lengths, packing=data.packing, document_mask=data.document_mask)


def earlier_rows(segments: Sequence[Segment], store: TokenStore, number: int) -> SplitRows:
    """Open the training rows of an earlier segment.

    Raises:
        DataError: The store no longer has that segment's data.
    """
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
    segment = segments[number]
    lengths = row_lengths(segment.mixture, segment.sequence_length)
    return SplitRows(parts, "train", *lengths, packing=segment.packing, document_mask=segment.document_mask)


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

"""The segments of a run: what determines its rows, before and after each change of the run.

A run whose config and data never change has none. An accepted change begins a segment at the step from which the run
continues. Each segment keeps everything that determines the rows of its steps. So they stay a pure function of
(segments, step), whatever the config and the store contain later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section
from headway.config.batches import Batches, BatchStage
from headway.config.sections.data import MixtureConfig

#: Rows of every part of the data, by source and row length.
PartRows = Mapping[str, Mapping[int, Sequence[int]]]

#: Key in the context of a checkpoint.
SEGMENTS = "segments"

Count = Annotated[int, Field(ge=0)]


class SegmentSource(Section):
    """Settings of a mixture for one source."""

    name: str
    """Name in the token store."""
    weight: float | None = None
    max_epochs: float | None = None


class Segment(Section):
    """Steps from `first_step` to the next segment."""

    first_step: Count
    seed: Count
    steps: PositiveInt
    """`train.steps`, since stages may begin at a share of it."""
    sequence_length: PositiveInt
    row_tokens: PositiveInt | None = None
    """Tokens that a row counts as, where rows are samples of a dataset and `sequence_length` is 1."""
    global_batch: PositiveInt
    """Rows in one optimizer step."""
    batch_ramp: list[BatchStage] = []
    packing: Literal["concat", "best_fit", "pad"] = "concat"
    """`data.packing`."""
    document_mask: bool = False
    """`data.document_mask`."""
    sources: list[SegmentSource] = []
    mixture: MixtureConfig = MixtureConfig()
    data: str
    """Fingerprint of the data."""
    rows: dict[str, dict[PositiveInt, list[Count]]]
    """Rows of each source by row length: of the data that the run began with, and of each part added since."""
    shards: list[dict[str, list[str]]] = []
    """Names of the shards of every part but the last, by source; the last part holds all other shards."""
    new_epoch: bool = False
    """The segment begins a new epoch of all data (`--start-epoch`) instead of continuing the current one."""
    changes: list[str] = []
    """Descriptions of the accepted changes."""

    def plans_as(self, other: Segment) -> bool:
        """Return whether two segments determine the rows of steps alike, wherever they begin."""
        ignored = {"first_step", "new_epoch", "changes", "shards", "rows"}
        if not any(isinstance(stage.start, float) or stage.change == "linear" for stage in self.mixture.stages):
            ignored.add("steps")
        return self.model_dump(exclude=ignored) == other.model_dump(exclude=ignored)


def batches_of(segments: Sequence[Segment]) -> Batches:
    """Return the batches of a run with these segments, at least one.

    All conversions between steps, rows and tokens of the run use them.
    """
    batches: Batches | None = None
    for segment in segments:
        length = segment.row_tokens or segment.sequence_length
        batches = Batches.planned(segment.batch_ramp, segment.global_batch, length, batches, segment.first_step)
    assert batches is not None, "there is one"
    return batches


def batches_before(segments: Sequence[Segment]) -> tuple[Batches, int] | None:
    """Return the batches of all segments but the last, and the step where it begins; None for a single segment."""
    return (batches_of(segments[:-1]), segments[-1].first_step) if len(segments) > 1 else None


def first_difference(before: Sequence[Segment], after: Sequence[Segment]) -> int | None:
    """Return the first step whose rows may differ between two lists of segments; None if there is none.

    An empty `before` means that the run was not changed yet: the rows differ from the second segment on.
    """
    if not after:
        return None
    before = before or after[:1]
    for old, new in zip(before, after, strict=False):
        if (old.first_step, old.new_epoch) != (new.first_step, new.new_epoch) or not old.plans_as(new):
            return min(old.first_step, new.first_step)
    longer = max(before, after, key=len)[min(len(before), len(after)) :]
    return longer[0].first_step if longer else None


def begin(segments: Sequence[Segment], start: Segment) -> tuple[list[Segment], int | None]:
    """Begin a segment, which replaces all others from its first step on.

    Returns:
        The new list of segments, and the first step whose rows may differ from before.
    """
    after = [*(segment for segment in segments if segment.first_step < start.first_step), start]
    return after, first_difference(segments, after)


def up_to(ranges: Sequence[tuple[int, int]], step: int | None) -> list[tuple[int, int]]:
    """Cut ranges of skipped steps (first, end) at a step; None keeps them.

    A skipped step stands for its rows. Steps that have other rows since a change are no longer skipped.
    """
    if step is None:
        return list(ranges)
    return [(first, min(last, step)) for first, last in ranges if first < step]

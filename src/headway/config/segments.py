"""The segments of a run: what its rows follow from, where it was changed on the way.

A run whose config and data never change has none. An accepted change begins a segment at the step from which the run
goes on. Each segment keeps all that the rows of its steps follow from, so that they stay a pure function of (segments,
step), whatever the config and the store say by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from headway.config.base import Section
from headway.config.batches import Batches, BatchStage
from headway.config.data import MixtureConfig, stored_names

if TYPE_CHECKING:
    from headway.config.schema import Config

#: Rows of every part of the data, by source and row length.
PartRows = Mapping[str, Mapping[int, Sequence[int]]]

#: Key of a checkpoint's context.
SEGMENTS = "segments"

Count = Annotated[int, Field(ge=0)]


class SegmentSource(Section):
    """What a mixture asks of one source."""

    name: str
    """As the token store calls it."""
    weight: float | None = None
    max_epochs: float | None = None


class Segment(Section):
    """Steps from `first_step` on, up to the next segment."""

    first_step: Count
    seed: Count
    steps: PositiveInt
    """`train.steps`, of which stages may begin at a share."""
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
    """Rows of each source, by their length: of the data that the run began with, and of each part that has joined."""
    shards: list[dict[str, list[str]]] = []
    """Names of the shards of every part but the last, by source; the last part is all that is in no other one."""
    new_epoch: bool = False
    """The segment begins an epoch of all data anew (`--start-epoch`) instead of going on with the one under way."""
    changes: list[str] = []
    """What was accepted, in words."""

    @classmethod
    def of(
        cls,
        config: Config,
        first_step: int,
        data: str,
        rows: PartRows,
        shards: Sequence[Mapping[str, Sequence[str]]] = (),
        new_epoch: bool = False,
        changes: Sequence[str] = (),
    ) -> Segment:
        """The segment that a resolved config begins.

        Args:
            config: The config.
            first_step: The segment's.
            data: Fingerprint of the data.
            rows: Rows of each part of the data, by source and row length.
            shards: Names of the shards of every part but the last.
            new_epoch: It goes through all data anew.
            changes: What was accepted, in words.
        """
        train, data_config = config.train, config.data
        assert train.steps is not None, "the config is resolved"
        names = stored_names(data_config.sources)
        sources = [
            SegmentSource(name=name, weight=source.weight, max_epochs=source.max_epochs)
            for name, source in zip(names, data_config.sources, strict=True)
        ]
        stored = {str(source.name): name for name, source in zip(names, data_config.sources, strict=True)}
        stages = [
            stage.model_copy(update={"weights": {stored.get(name, name): w for name, w in stage.weights.items()}})
            if stage.weights is not None
            else stage
            for stage in data_config.mixture.stages
        ]
        return cls(
            first_step=first_step,
            seed=config.seed,
            steps=train.steps,
            sequence_length=train.sequence_length,
            global_batch=train.global_batch_rows,
            batch_ramp=train.batch_ramp,
            packing=data_config.packing,
            document_mask=data_config.document_mask,
            sources=sources,
            mixture=data_config.mixture.model_copy(update={"stages": stages}),
            data=data,
            rows={name: {length: list(parts) for length, parts in of.items()} for name, of in rows.items()},
            shards=[{name: list(files) for name, files in part.items()} for part in shards],
            new_epoch=new_epoch,
            changes=list(changes),
        )

    def plans_as(self, other: Segment) -> bool:
        """Whether the rows of the steps follow from the same in two segments, wherever they begin."""
        beside = {"first_step", "new_epoch", "changes", "shards", "rows"}
        if not any(isinstance(stage.start, float) or stage.change == "linear" for stage in self.mixture.stages):
            beside.add("steps")
        return self.model_dump(exclude=beside) == other.model_dump(exclude=beside)


def batches_of(segments: Sequence[Segment]) -> Batches:
    """Return the rows and tokens of every step of a run with these segments, at least one.

    Whatever counts rows or tokens as a function of the step, or steps for an amount of tokens, asks these.
    """
    batches: Batches | None = None
    for segment in segments:
        length = segment.row_tokens or segment.sequence_length
        batches = Batches.planned(segment.batch_ramp, segment.global_batch, length, batches, segment.first_step)
    assert batches is not None, "there is one"
    return batches


def batches_before(segments: Sequence[Segment]) -> tuple[Batches, int] | None:
    """The batches of all segments but the last, and the step where that begins; None where there are no others."""
    return (batches_of(segments[:-1]), segments[-1].first_step) if len(segments) > 1 else None


def first_difference(before: Sequence[Segment], after: Sequence[Segment]) -> int | None:
    """Return the first step whose rows may be others by `after` than by `before`; None if there is none.

    Where there were none before, the run had not been changed yet: they differ where the second segment begins.
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
    """Begin a segment, which takes the place of all from its first step on.

    Returns:
        The segments from now on, and the first step whose rows may be others by that.
    """
    after = [*(segment for segment in segments if segment.first_step < start.first_step), start]
    return after, first_difference(segments, after)


def up_to(ranges: Sequence[tuple[int, int]], step: int | None) -> list[tuple[int, int]]:
    """Return ranges of steps (the first, and the one after the last) without what lies behind a step, if there is one.

    Steps that were to be left out are meant by their rows: where they have others since, nothing was decided of them.
    """
    if step is None:
        return list(ranges)
    return [(first, min(last, step)) for first, last in ranges if first < step]

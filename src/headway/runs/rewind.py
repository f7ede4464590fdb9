"""Going back to an earlier checkpoint, in an attempt that goes on; and what a decision to do so means for checkpoints.

A rollback leaves out the rows of some steps, for ever. So a checkpoint from after these steps that was made with their
rows is of a run that is no longer this one. Every checkpoint says which steps were left out (`left_out` in its
context), the ledger says which are to be, and where they differ the checkpoint is removed: at the rollback, and again
whenever an attempt begins, for the one before may have been killed between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headway.checkpoint.discovery import bring_earlier
from headway.checkpoint.format.folders import pruning
from headway.checkpoint.lineage import PARENT, parent_record
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.skipped_ranges import LEFT_OUT, Ranges, is_outdated, ranges_of
from headway.checkpoint.store import CheckpointStore
from headway.checkpoint.verify_across_hosts import check_same_on_all_hosts
from headway.config.segments import SEGMENTS, Segment, first_difference, up_to
from headway.core.console import warning
from headway.core.waiting import VISIBILITY_TIMEOUT
from headway.runs.ledger import Ledger
from headway.training.loss_scale import begin_scaling
from headway.training.state import TrainState

if TYPE_CHECKING:
    from headway.checkpoint.store import CheckpointInfo
    from headway.parallel.world import World
    from headway.training.loop import Job


class CheckpointRewinder:
    """`training.rollback.Rewinder` from a run's own checkpoints.

    Args:
        store: Those here.
        world: The workers.
        find_tier: Gives the run's remote tier, if it has one: on another disk than before there may be none here that
            is old enough.
    """

    def __init__(self, store: CheckpointStore, world: World, find_tier: Callable[[], RemoteTier] | None = None) -> None:
        self._store, self._world, self._find_tier = store, world, find_tier

    def target(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> int | None:
        """Only the first worker looks, since what it finds is verified byte by byte."""
        found = None
        if self._world.is_first:
            with pruning(self._store.directory):
                good = (s for s in sorted((i.step for i in self._store.list()), reverse=True) if s <= step)
                found = next((s for s in good if self._store.verify(s).good), None)
            if found is None and self._find_tier is not None:
                found = bring_earlier(self._store, self._find_tier, step, lambda m: not is_outdated(m, skipped_ranges))
        number = self._world.broadcast_number(-1 if found is None else found)
        return number if number >= 0 else None

    def rewind(self, job: Job, to_step: int) -> None:
        """All workers load together, after the first one has removed what must not be found again."""
        job.checkpoint_context[LEFT_OUT] = [list(steps) for steps in job.state.skipped_ranges]
        if self._world.is_first:
            discard_outdated(self._store, job.state.skipped_ranges)
        self._world.barrier()
        info = self._store.info(to_step, VISIBILITY_TIMEOUT)
        blocks = job.state.prepare_to_load()
        check_same_on_all_hosts(info, blocks, self._world.rank, self._world.gather_json)
        self._store.load_into(info, blocks, self._world.gather_json)
        job.state.loaded()
        job.state.take_cursor(info.cursor)
        job.checkpoint_context[PARENT] = parent_record(info.manifest)
        begin_scaling(job.state.cursor, job.config.train.precision)  # the checkpoint may be of another precision
        job.writer.rolled_back(to_step, job.state.skipped_ranges)


def discard_outdated(store: CheckpointStore, skipped_ranges: Sequence[tuple[int, int]]) -> None:
    """Remove checkpoints that were made with rows which are left out by now."""
    for info in store.list():
        if is_outdated(info.manifest, skipped_ranges):
            warning(f"removing {info.path.name}: it was made with rows that are left out now")
            store.discard(info.step)


def decided(ledger: Ledger) -> Ranges:
    """The steps whose rows are left out, as the ledger has them."""
    return tuple(sorted((d.first_step, d.last_step) for d in ledger.decisions() if d.action == "rollback"))


def decided_for(segments: Sequence[Segment], ledger: Ledger, start: CheckpointInfo | None) -> tuple[Ranges, Ranges]:
    """Return the steps whose rows are left out, as the ledger and the checkpoint to start from have them.

    Args:
        segments: Of the run as it continues. Where they give steps other rows than these had, the decision has ended.
        ledger: The run's.
        start: The checkpoint.

    Returns:
        What is left out, and of what was decided that which no longer is.
    """
    known = [Segment.model_validate(begun.segment) for begun in ledger.segments()]
    made_by = [Segment.model_validate(segment) for segment in start.context.get(SEGMENTS, ())] if start else []
    found = [(decided(ledger), known), (ranges_of(start.context) if start else (), made_by)]
    kept, ended = set[tuple[int, int]](), set[tuple[int, int]]()
    for ranges, before in found:
        step = first_difference(before, segments)
        kept.update(up_to(ranges, step))
        ended.update((max(first, step), last) for first, last in ranges if step is not None and last > step)
    return tuple(sorted(kept)), tuple(sorted(ended))


def take_decisions(
    state: TrainState, segments: Sequence[Segment], ledger: Ledger, start: CheckpointInfo | None, world: World
) -> dict[str, list[list[int]]]:
    """Make a state leave out what was decided before; returns what its checkpoints say of that."""
    mine: list[list[int]] = []
    if world.is_first:
        kept, ended = decided_for(segments, ledger, start)
        mine = [list(steps) for steps in kept]
        for first, last in ended:
            warning(
                f"the rows of steps {first + 1:,} to {last:,} were to be left out; since the run was changed,"
                " these steps have other rows, and none are left out"
            )
    ranges = world.gather_json(mine)[0]
    state.skipped_ranges = tuple((int(first), int(last)) for first, last in ranges)
    return {LEFT_OUT: ranges} if ranges else {}

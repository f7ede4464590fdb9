"""Rollback to an earlier checkpoint within an attempt, and its consequences for later checkpoints.

A rollback skips the rows of some steps for ever. So a later checkpoint that was trained on these rows is outdated.
Every checkpoint records its skipped ranges (`left_out` in its context), and the ledger records those of the run. A
checkpoint that differs from the ledger is removed at the rollback. The same check runs at the start of each attempt,
since the previous one may have been killed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headway.checkpoint.discovery import bring_earlier
from headway.checkpoint.format.folders import pruning
from headway.checkpoint.lineage import PARENT, parent_record
from headway.checkpoint.remote.tier import RemoteTier
from headway.checkpoint.skipped_ranges import LEFT_OUT, Ranges, is_outdated, ranges_of
from headway.checkpoint.store import CheckpointInfo, CheckpointStore
from headway.checkpoint.verify_across_hosts import check_same_on_all_hosts
from headway.config.sections.segments import SEGMENTS, Segment, first_difference, up_to
from headway.core.console import warning
from headway.core.process.waiting import VISIBILITY_TIMEOUT
from headway.parallel.world import World
from headway.run.directory.ledger import Ledger, decided
from headway.training.average import AVERAGE
from headway.training.job import Job
from headway.training.setup.precision import begin_scaling
from headway.training.state import TrainState


class CheckpointRewinder:
    """A `training.job.Rewinder` that uses the run's own checkpoints.

    Args:
        store: The local checkpoints.
        world: The workers.
        find_tier: Return the run's remote tier, if it has one: after a move to another disk, no local checkpoint may be
            old enough.
        info: Return a checkpoint that the first worker has, called by all workers together; None if all see its folder.
    """

    def __init__(
        self,
        store: CheckpointStore,
        world: World,
        find_tier: Callable[[], RemoteTier] | None = None,
        info: Callable[[int], CheckpointInfo] | None = None,
    ) -> None:
        self._store = store
        self._world = world
        self._find_tier = find_tier
        self._info = info or partial(store.info, patience_seconds=VISIBILITY_TIMEOUT)

    def target(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> int | None:
        """Return the newest step to roll back to; only the first worker searches, since it verifies every byte."""
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
        """Load a checkpoint on all workers together, after the first one has removed outdated checkpoints."""
        job.checkpoint_context[LEFT_OUT] = [list(steps) for steps in job.state.skipped_ranges]
        if self._world.is_first:
            discard_outdated(self._store, job.state.skipped_ranges)
        self._world.barrier()
        info = self._info(to_step)
        load_state(job.state, self._store, info, self._world)
        job.checkpoint_context[PARENT] = parent_record(info.manifest)
        begin_scaling(job.state.cursor, job.config.train.precision)  # the checkpoint may be of another precision
        job.writer.note_rollback(to_step, job.state.skipped_ranges)


def load_state(state: TrainState, store: CheckpointStore, info: CheckpointInfo, world: World) -> None:
    """Load a checkpoint into the state of every worker; all of them must call it.

    Raises:
        CheckpointError: the checkpoint belongs to another model or optimizer. Nothing has been copied then.
        CorruptionError: a machine reads other bytes than the first worker has verified.
    """
    blocks = state.prepare_to_load(info.manifest.has_moments)
    is_average_there = any(name.startswith(AVERAGE) for name in info.manifest.tensors)
    if not is_average_there:  # `train.ema` is new
        blocks = {name: block for name, block in blocks.items() if not name.startswith(AVERAGE)}
    check_same_on_all_hosts(info, blocks, world.rank, world.gather_json)
    store.load_into(info, blocks, world.gather_json)
    state.loaded()
    if state.average is not None and not is_average_there:
        state.average.restart()
    state.take_cursor(info.cursor)


def discard_outdated(store: CheckpointStore, skipped_ranges: Sequence[tuple[int, int]]) -> None:
    """Remove local checkpoints that were trained on rows that the run skips now."""
    for info in store.list():
        if is_outdated(info.manifest, skipped_ranges):
            warning(f"removing {info.path.name}: it was trained on rows that are skipped now")
            store.discard(info.step)


def decided_for(segments: Sequence[Segment], ledger: Ledger, start: CheckpointInfo | None) -> tuple[Ranges, Ranges]:
    """Return the skipped ranges that the ledger and the checkpoint to start from record.

    Args:
        segments: Segments of the run as it continues. A decision ends where they give its steps other rows.
        ledger: The run's ledger.
        start: The checkpoint to start from.

    Returns:
        The ranges in force, and those that have ended.
    """
    known = [Segment.model_validate(begun.segment) for begun in ledger.segments()]
    made_by = [Segment.model_validate(segment) for segment in start.context.get(SEGMENTS, ())] if start else []
    found = [(decided(ledger), known), (ranges_of(start.context) if start else (), made_by)]
    kept = set[tuple[int, int]]()
    ended = set[tuple[int, int]]()
    for ranges, before in found:
        step = first_difference(before, segments)
        kept.update(up_to(ranges, step))
        ended.update((max(first, step), last) for first, last in ranges if step is not None and last > step)
    return tuple(sorted(kept)), tuple(sorted(ended))


def take_decisions(
    state: TrainState, segments: Sequence[Segment], ledger: Ledger, start: CheckpointInfo | None, world: World
) -> dict[str, list[list[int]]]:
    """Set the skipped ranges of a state by earlier decisions, and return the context that its checkpoints need."""
    mine: list[list[int]] = []
    if world.is_first:
        kept, ended = decided_for(segments, ledger, start)
        mine = [list(steps) for steps in kept]
        for first, last in ended:
            warning(
                f"the rows of steps {first + 1:,} to {last:,} were to be skipped; since the run was changed, these"
                " steps have other rows, and none are skipped"
            )
    ranges = world.gather_json(mine)[0]
    state.skipped_ranges = tuple((int(first), int(last)) for first, last in ranges)
    return {LEFT_OUT: ranges} if ranges else {}

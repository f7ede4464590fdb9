"""Going back to an earlier checkpoint, in an attempt that goes on; and what a decision to do so means for checkpoints.

A rollback leaves out the rows of some steps, for ever. So a checkpoint from after these steps that was made with their
rows is of a run that is no longer this one. Every checkpoint says which steps were left out (`left_out` in its
context), the ledger says which are to be, and where they differ the checkpoint is removed: at the rollback, and again
whenever an attempt begins, for the one before may have been killed between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.checkpoint.folders import pruning
from headway.checkpoint.format import Manifest
from headway.checkpoint.store import CheckpointStore
from headway.core.console import warning
from headway.core.waiting import SEEN_SECONDS
from headway.supervise.ledger import Ledger
from headway.training.state import TrainState

if TYPE_CHECKING:
    from headway.checkpoint.store import CheckpointInfo
    from headway.parallel.world import World
    from headway.training.loop import Job

LEFT_OUT = "left_out"
"""Key of a checkpoint's context: `[[first step, step after the last], ...]`."""

_Ranges = tuple[tuple[int, int], ...]


class CheckpointRewinder:
    """`training.rollback.Rewinder` from a run's own checkpoints."""

    def __init__(self, store: CheckpointStore, world: World) -> None:
        self._store, self._world = store, world

    def target(self, step: int) -> int | None:
        """Only the first worker looks, since what it finds is verified byte by byte."""
        found = -1
        if self._world.is_first:
            with pruning(self._store.directory):
                good = (s for s in sorted((i.step for i in self._store.list()), reverse=True) if s <= step)
                found = next((s for s in good if self._store.verify(s).good), -1)
        found = self._world.broadcast_number(found)
        return found if found >= 0 else None

    def rewind(self, job: Job, to_step: int) -> None:
        """All workers load together, after the first one has removed what must not be found again."""
        job.checkpoint_context[LEFT_OUT] = [list(steps) for steps in job.state.left_out]
        if self._world.is_first:
            discard_outdated(self._store, job.state.left_out)
        self._world.barrier()
        info = self._store.info(to_step, SEEN_SECONDS)
        self._store.load_into(info, job.state.prepare_to_load(), self._world.gather_json)
        job.state.loaded()
        job.state.take_cursor(info.cursor)


def discard_outdated(store: CheckpointStore, left_out: Sequence[tuple[int, int]]) -> None:
    """Remove checkpoints that were made with rows which are left out by now."""
    for info in store.list():
        if is_outdated(info.manifest, left_out):
            warning(f"removing {info.path.name}: it was made with rows that are left out now")
            store.discard(info.step)


def is_outdated(manifest: Manifest, left_out: Sequence[tuple[int, int]]) -> bool:
    """Whether a checkpoint was made with rows which are left out by now, wherever it lies."""
    known = [(int(first), int(last)) for first, last in manifest.context.get(LEFT_OUT, ())]
    return any(first < manifest.step and (first, last) not in known for first, last in left_out)


def decided(ledger: Ledger, start: CheckpointInfo | None = None) -> _Ranges:
    """The steps whose rows are left out, as the ledger and the checkpoint to start from have them."""
    ranges = [(d.first_step, d.last_step) for d in ledger.decisions() if d.action == "rollback"]
    return tuple(sorted({*ranges, *(ranges_of(start) if start else ())}))


def ranges_of(info: CheckpointInfo) -> _Ranges:
    """The steps that were left out of a checkpoint."""
    return tuple((int(first), int(last)) for first, last in info.context.get(LEFT_OUT, ()))


def take_decisions(
    state: TrainState, ledger: Ledger, start: CheckpointInfo | None, world: World
) -> dict[str, list[list[int]]]:
    """Make a state leave out what was decided before; returns what its checkpoints say of that."""
    mine = [list(steps) for steps in decided(ledger, start)] if world.is_first else []
    ranges = world.gather_json(mine)[0]
    state.left_out = tuple((int(first), int(last)) for first, last in ranges)
    return {LEFT_OUT: ranges} if ranges else {}

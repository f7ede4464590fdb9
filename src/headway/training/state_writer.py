"""A stand-in for `checkpoint.save.writer.CheckpointWriter` that keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.core.types import StateBlocks


class NoWriter:
    """A writer that makes no checkpoints, for training that is measured and leaves nothing behind.

    It has the methods of `CheckpointWriter` that the loop calls.
    """

    def get_ready(self, blocks: StateBlocks) -> None:
        """Do nothing."""

    def submit(
        self,
        step: int,
        blocks: StateBlocks,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        spent: Collection[str] = (),
    ) -> float:
        """Discard the state."""
        return 0.0

    def settle(self) -> None:
        """Do nothing."""

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Discard the state."""
        return 0.0

    def release_snapshot(self) -> None:
        """Do nothing."""

    def note_rollback(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""

    def outcomes(self) -> list[Outcome]:
        """Return no outcomes."""
        return []

    def uploads(self) -> list[Upload]:
        """Return no outcomes."""
        return []

    def lost_upload(self) -> None:
        """Do nothing."""

    def wants_another_try(self) -> bool:
        """Return False."""
        return False

    def wait(self) -> None:
        """Do nothing."""

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Do nothing."""

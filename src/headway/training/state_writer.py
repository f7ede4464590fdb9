"""The interface to which a training loop hands over its states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.core.errors import CheckpointError
from headway.core.types import StateBlocks


class StateWriter(Protocol):
    """The part of `checkpoint.writer.CheckpointWriter` that the loop uses; its docstrings explain each method."""

    def get_ready(self, blocks: StateBlocks) -> Any:
        """Allocate memory for a copy of a state."""
        ...

    def submit(
        self,
        step: int,
        blocks: StateBlocks,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        spent: Collection[str] = (),
    ) -> float:
        """Accept a state to write; return the seconds that training waited."""
        ...

    def settle(self) -> None:
        """Wait until no save reads the state itself."""
        ...

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Accept a state that is written only if this worker dies; return the seconds that training waited."""
        ...

    def release_snapshot(self) -> None:
        """Release the states that are held."""
        ...

    def note_rollback(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Treat the states that follow as successors of `step`, with the rows of those steps left out."""
        ...

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of saves since the last call."""
        ...

    def uploads(self) -> list[Upload]:
        """Return the outcomes of uploads since the last call."""
        ...

    def lost_upload(self) -> CheckpointError | None:
        """Return, after `close`, why another process prevented the upload of the newest checkpoint."""
        ...

    def wants_another_try(self) -> bool:
        """Return whether the state that was handed over last should be handed over again."""
        ...

    def wait(self) -> None:
        """Block until all states that were handed over are on disk."""
        ...

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Finish, and release all resources."""
        ...


class NoWriter:
    """A writer that makes no checkpoints, for training that is measured and leaves nothing behind."""

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

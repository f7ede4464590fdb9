"""Who takes the states that a training loop hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from headway.checkpoint.save.outcomes import Outcome, Upload
from headway.core.errors import CheckpointError
from headway.core.types import StateBlocks


class StateWriter(Protocol):
    """What the loop wants of `checkpoint.writer.CheckpointWriter`, whose words say what each is for."""

    def get_ready(self, blocks: StateBlocks) -> Any:
        """Make room for a state."""
        ...

    def submit(
        self,
        step: int,
        blocks: StateBlocks,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        spent: Collection[str] = (),
    ) -> float:
        """Take a state to be written; returns the seconds that training waited."""
        ...

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Take a state to be written only if this worker dies."""
        ...

    def release_snapshot(self) -> None:
        """Let go of the states that are held."""
        ...

    def rolled_back(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Take what comes next for what follows `step`, with the rows of those steps left out."""
        ...

    def outcomes(self) -> list[Outcome]:
        """What came of saves since this was last asked."""
        ...

    def uploads(self) -> list[Upload]:
        """What came of uploads since this was last asked."""
        ...

    def lost_upload(self) -> CheckpointError | None:
        """After `close`: why the newest checkpoint is not in the remote tier, where somebody else has that."""
        ...

    def wants_another_try(self) -> bool:
        """Whether what was handed over last should be handed over again."""
        ...

    def wait(self) -> None:
        """Return when all that was handed over is on disk."""
        ...

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Finish, and let go of all resources."""
        ...


class NoWriter:
    """Stands where checkpoints go, and lets none be made: for training that is measured and leaves nothing."""

    def get_ready(self, blocks: StateBlocks) -> None:
        """Nothing to get ready for."""

    def submit(
        self,
        step: int,
        blocks: StateBlocks,
        cursor: Mapping[str, int],
        context: Mapping[str, Any],
        spent: Collection[str] = (),
    ) -> float:
        """Not even the last state is kept."""
        return 0.0

    def snapshot(self, step: int, blocks: StateBlocks, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Nothing is held."""
        return 0.0

    def release_snapshot(self) -> None:
        """There are none."""

    def rolled_back(self, step: int, skipped_ranges: Sequence[tuple[int, int]]) -> None:
        """Nothing was saved."""

    def outcomes(self) -> list[Outcome]:
        """Nothing was saved."""
        return []

    def uploads(self) -> list[Upload]:
        """Nothing was uploaded."""
        return []

    def lost_upload(self) -> None:
        """Nothing was uploaded."""

    def wants_another_try(self) -> bool:
        """There was no first one."""
        return False

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self, flush_snapshot: bool = False, hurried: Callable[[], bool] = lambda: False) -> None:
        """Nothing was opened."""

"""How the training loop hands over its state: one small protocol, so that where and when it is written can change."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headway.checkpoint.store import CheckpointStore

if TYPE_CHECKING:
    from headway.core.types import StateTensors


class CheckpointWriter(Protocol):
    """Takes states and makes checkpoints of them, in the order they come in."""

    def submit(self, step: int, tensors: StateTensors, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Hand over a state; when this returns, the tensors may change again.

        Returns:
            Seconds that training had to wait.

        Raises:
            CheckpointError: this or an earlier checkpoint cannot be written.
        """
        ...

    def wait(self) -> None:
        """Return when all that was handed over is on disk.

        Raises:
            CheckpointError: a checkpoint cannot be written.
        """
        ...

    def close(self) -> None:
        """Finish what was handed over and let go of all resources. Safe to call twice."""
        ...


class SynchronousWriter:
    """Writes at once, in the caller's thread: a checkpoint that was submitted is on disk."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def submit(self, step: int, tensors: StateTensors, cursor: Mapping[str, int], context: Mapping[str, Any]) -> float:
        """Save; all of the time is a wait."""
        start = time.monotonic()
        self._store.save(step, tensors, cursor, context)
        return time.monotonic() - start

    def wait(self) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """Nothing is held."""

"""What comes of saves and uploads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import CheckpointError


class WriterDied(CheckpointError):
    """The process beside this worker ended before a checkpoint was whole."""


@dataclass(frozen=True)
class Outcome:
    """What came of a save."""

    step: int
    seconds: float = 0.0
    """From the order until it was visible; training went on meanwhile."""
    bytes: int = 0
    error: CheckpointError | None = None
    """Why there is no such checkpoint."""


@dataclass(frozen=True)
class Upload:
    """What came of sending a checkpoint to the remote tier."""

    step: int
    seconds: float | None
    """None when it failed; why was said."""

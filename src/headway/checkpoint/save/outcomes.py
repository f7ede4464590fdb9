"""What comes of saves and uploads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import CheckpointError

_FIX = (
    "the next save is tried by a new process; if that ends too, what it printed on standard error tells why, or the "
    "kernel's log (dmesg) where memory ran out"
)


class WriterDied(CheckpointError):
    """The process beside this worker ended before a checkpoint was whole, or could not be started.

    Args:
        what: How it ended.
        where: The checkpoints' folder.
        fix: What to do about it, when that is known.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix or _FIX)


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

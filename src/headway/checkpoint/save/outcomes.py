"""Outcomes of saves and uploads."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import CheckpointError

_FIX = (
    "a new process tries the next save; if that ends too, read its messages on standard error, or the kernel's log "
    "(dmesg) if memory ran out"
)


class WriterDied(CheckpointError):
    """A writer process that ended before its checkpoint was complete, or could not be started.

    Args:
        what: How it ended.
        where: The run's `checkpoints` folder.
        fix: How to fix it, if that is known.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, fix=fix or _FIX)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a save."""

    step: int
    seconds: float = 0.0
    """From submission until the checkpoint was visible; training continued meanwhile."""
    bytes: int = 0
    error: CheckpointError | None = None
    """Why the save failed; None if it succeeded."""


@dataclass(frozen=True)
class Upload:
    """The outcome of an upload to the remote tier."""

    step: int
    seconds: float | None
    """None if it failed; the reason was logged."""

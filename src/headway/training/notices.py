"""What the loop makes of notices on the attempt's board: a wish to stop or to save, as signals are."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.console import notice as say
from headway.core.console import warning
from headway.core.format import format_seconds
from headway.core.preemption_board import SIGNAL_KEY, Board, Notice, post
from headway.training.callbacks import Callback

if TYPE_CHECKING:
    from headway.checkpoint.save.outcomes import Outcome
    from headway.training.loop import Job


class NoticeReader(Callback):
    """Reads the board once a second, and knows how long a save takes.

    Args:
        attempt: The attempt's folder.
    """

    def __init__(self, attempt: Path) -> None:
        self._attempt, self._board = attempt, Board(attempt)
        self._save_seconds: float | None = None
        self._saved = 0
        self._told: set[Notice] = set()

    def stop(self, now: bool = False) -> Notice | None:
        """The first notice that asks to stop; `now` looks even if it has just looked."""
        found = next((notice for notice in self._board.notices(now) if notice.wish == "stop"), None)
        if found is not None and found not in self._told:
            self._told.add(found)
            say(f"{found}: saving and stopping")
            short = too_short(found, self._save_seconds)
            if short:
                warning(short)
        return found

    def save(self) -> bool:
        """Whether a notice asks to save that was not followed by a checkpoint yet."""
        wishes = [notice for notice in self._board.notices() if notice.wish == "save"]
        for found in wishes[self._saved :]:
            if found not in self._told:
                self._told.add(found)
                say(f"{found}: saving, and going on")
        return len(wishes) > self._saved

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """All that was wished before is saved by this."""
        self._saved = sum(notice.wish == "save" for notice in self._board.notices(now=True))

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """So long takes a save; of other workers than the first, its part."""
        if outcome.error is None:
            self._save_seconds = outcome.seconds

    def put_up_signal(self, name: str) -> None:
        """Note on the board that a signal has come, for the attempt's record."""
        with suppress(OSError):  # a full disk is told by whoever saves
            post(self._attempt, Notice(sender(os.environ), name, "stop", key=SIGNAL_KEY))


def too_short(notice: Notice, save_seconds: float | None) -> str | None:
    """What to say when a save is not expected to be done in time; None when it is, or when nobody knows."""
    left = None if notice.deadline is None else notice.deadline - time.time()
    if left is None or save_seconds is None or save_seconds <= left:
        return None
    return (
        f"the last save took {format_seconds(save_seconds)}, and {format_seconds(max(0.0, left))} are left: it may not"
        " be done in time; then the run goes on from the checkpoint before it (a shorter checkpoint.every loses less)"
    )


def sender(environment: Mapping[str, str]) -> str:
    """Who sends signals to this process, as far as its environment tells."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    return "slurm" if "SLURM_JOB_ID" in environment else "signal"

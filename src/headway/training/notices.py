"""Notices on the attempt's board, as requests of the loop to stop or to save."""

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
    """Reads the board once a second, and measures how long a save takes.

    Args:
        attempt: The attempt's folder.
    """

    def __init__(self, attempt: Path) -> None:
        self._attempt, self._board = attempt, Board(attempt)
        self._save_seconds: float | None = None
        self._saved = 0
        self._reported: set[Notice] = set()

    def stop(self, now: bool = False) -> Notice | None:
        """Return the first notice that asks to stop, and report it once.

        Args:
            now: Read the board even if it was just read.
        """
        found = next((notice for notice in self._board.notices(now) if notice.wish == "stop"), None)
        if found is not None and found not in self._reported:
            self._reported.add(found)
            say(f"{found}: saving and stopping")
            short = too_short(found, self._save_seconds)
            if short:
                warning(short)
        return found

    def save(self) -> bool:
        """Return whether a notice asks to save that no checkpoint has followed yet."""
        wishes = [notice for notice in self._board.notices() if notice.wish == "save"]
        for found in wishes[self._saved :]:
            if found not in self._reported:
                self._reported.add(found)
                say(f"{found}: saving, and continuing")
        return len(wishes) > self._saved

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Count all earlier requests to save as done."""
        self._saved = sum(notice.wish == "save" for notice in self._board.notices(now=True))

    def on_saved(self, job: Job, outcome: Outcome) -> None:
        """Remember the seconds of the save; on other workers than the first, those of its part."""
        if outcome.error is None:
            self._save_seconds = outcome.seconds

    def post_signal(self, name: str) -> None:
        """Post on the board that a signal has arrived, for the attempt's record."""
        with suppress(OSError):  # the save reports a full disk
            post(self._attempt, Notice(sender(os.environ), name, "stop", key=SIGNAL_KEY))


def too_short(notice: Notice, save_seconds: float | None) -> str | None:
    """Describe that a save is not expected to finish in time; None if it is, or if that is unknown."""
    left = None if notice.deadline is None else notice.deadline - time.time()
    if left is None or save_seconds is None or save_seconds <= left:
        return None
    return (
        f"the last save took {format_seconds(save_seconds)}, and {format_seconds(max(0.0, left))} are left: it may not"
        " be done in time; then the run resumes from the checkpoint before it (a shorter checkpoint.every loses less)"
    )


def sender(environment: Mapping[str, str]) -> str:
    """Return what sends signals to this process, as far as its environment tells."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    return "slurm" if "SLURM_JOB_ID" in environment else "signal"

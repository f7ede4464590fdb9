"""Requests to stop or to save: signals of this process, and notices on the attempt's board."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from headway.checkpoint.save.outcomes import Outcome
from headway.core.console import is_first_worker, notice, warning
from headway.core.coordination.preemption_board import BUDGET_SOURCE, CANCEL_KEY, SIGNAL_KEY, Board, Notice, post
from headway.core.errors import Preempted
from headway.core.format import format_seconds
from headway.core.process.signals import STOP_SIGNALS, handled, pending_signals
from headway.training.job import Callback, Job

#: A scheduler signals every process of a job, and the supervisor passes its own signal on: both are one Ctrl-C.
_DUPLICATE_SECONDS = 1.0

#: Handlers that stay until the process ends. Python would restore the previous handlers when it frees these.
_permanent_handlers: list[object] = []


class Requests(NamedTuple):
    """What a worker asks for after a step, or what all workers agree on."""

    stop: bool
    """Save and stop."""
    save: bool
    """Save and continue."""
    give_up: bool
    """End the run, since too many saves have failed."""


class StopSignals:
    """Turns signals (`STOP_SIGNALS`) and notices into requests that the loop reads between steps.

    A second Ctrl-C acts at once.

    Args:
        notices: Reads the board of the attempt; without it only signals count.
        own_process: This process ends with the attempt. Once all is saved after a signal, further signals ask for
            nothing more. They must not end the process before it has reported why it stops: the first worker that
            leaves has the agent send a signal to the rest.
    """

    def __init__(self, notices: NoticeReader | None = None, own_process: bool = False) -> None:
        self.name: str | None = None
        self._notices = notices
        self._own_process = own_process
        self._interrupted: float | None = None
        self._handled = handled(STOP_SIGNALS, self._handle)

    @property
    def stop(self) -> bool:
        """Whether a signal has arrived, or a notice that asks to stop."""
        return self.name is not None or (self._notices is not None and self._notices.stop() is not None)

    @property
    def save(self) -> bool:
        """Whether a notice asks to save and continue."""
        return self._notices is not None and self._notices.save()

    @property
    def budget_reached(self) -> bool:
        """Whether the run stops because its budget is spent, once all workers have agreed to stop."""
        found = self._notices.stop(now=True) if self._notices is not None else None
        return found is not None and found.source == BUDGET_SOURCE

    def reason(self) -> str:
        """Return why the run stops, once all workers have agreed to stop."""
        found = self._notices.stop(now=True) if self._notices is not None else None
        if found is not None:  # use the first worker's name of a signal that it has posted
            return found.what if found.key == SIGNAL_KEY else str(found)
        if self.name is not None and self._notices is not None and is_first_worker():
            self._notices.post_signal(self.name)
        return self.name or "a signal to another worker"

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has asked that the run end for good."""
        return self._notices is not None and self._notices.is_cancelled()

    def __enter__(self) -> Self:
        self._before = self._handled.__enter__()
        if pending_signals:
            self.name = signal.Signals(pending_signals[-1]).name
            pending_signals.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self._own_process and kind is not None and issubclass(kind, Preempted):
            _permanent_handlers.append(self._handled)
        else:
            self._handled.__exit__(kind, *error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
        elif now - self._interrupted >= _DUPLICATE_SECONDS:
            signal.signal(number, self._before[signal.SIGINT])
            signal.raise_signal(number)


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
        found = next((found for found in self._board.notices(now) if found.wish == "stop"), None)
        if found is not None and found not in self._reported:
            self._reported.add(found)
            notice(f"{found}: saving and stopping")
            short = too_short(found, self._save_seconds)
            if short:
                warning(short)
        return found

    def is_cancelled(self) -> bool:
        """Return whether a notice asks that the run end for good."""
        return any(found.key == CANCEL_KEY for found in self._board.notices(now=True))

    def save(self) -> bool:
        """Return whether a notice asks to save that no checkpoint has followed yet."""
        wishes = [found for found in self._board.notices() if found.wish == "save"]
        for found in wishes[self._saved :]:
            if found not in self._reported:
                self._reported.add(found)
                notice(f"{found}: saving, and continuing")
        return len(wishes) > self._saved

    def on_checkpoint(self, job: Job, step: int, stall_seconds: float) -> None:
        """Count all earlier requests to save as done."""
        self._saved = sum(found.wish == "save" for found in self._board.notices(now=True))

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

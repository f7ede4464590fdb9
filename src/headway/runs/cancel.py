"""Cancelling a run: it saves, and ends with an exit code that no scheduler answers by starting it again."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from headway.checkpoint.save.fence import read_owner
from headway.core.coordination.preemption_board import CANCEL_KEY, Notice, post
from headway.core.errors import Cancelled, CheckpointError
from headway.core.files.atomic import write_json
from headway.runs.run_directory import attempt_folder

_REQUEST_FILE = ".cancel"


def request_cancel(run: Path, why: str = "") -> None:
    """Ask a run to save and end with exit code 7, wherever it trains.

    The request holds for the command that owns the run now, also while that waits between two attempts.

    Args:
        run: The run directory.
        why: Who asks, or why, for the run's record.

    Raises:
        CheckpointError: there is no run, or nothing can be written there.
    """
    owner, what = read_owner(run), "cancelled" + (f": {why}" if why else "")
    if owner is None:
        raise CheckpointError("this is no run directory, or its run was never started", where=str(run), fix="check it")
    try:
        write_json(run / _REQUEST_FILE, {"what": what, "attempt": owner.attempt, "time": time.time()})
        post(attempt_folder(run, owner.attempt), Notice("cancel", what, key=CANCEL_KEY))
    except OSError as error:
        raise CheckpointError(
            f"the request cannot be written: {error.strerror or error}", where=str(run), fix="make room there"
        ) from error


def check_not_cancelled(run: Path) -> None:
    """Check that nobody has asked to cancel the run since this command began.

    Raises:
        Cancelled: somebody has.
    """
    if (run / _REQUEST_FILE).exists():
        raise Cancelled(
            "cancelled between two attempts; the newest checkpoint is intact",
            where=str(run),
            fix="run the same command again if it is to continue after all",
        )


def forget_cancel(run: Path) -> None:
    """Remove an earlier request: a new command means that the run is to continue."""
    with suppress(OSError):
        (run / _REQUEST_FILE).unlink(missing_ok=True)

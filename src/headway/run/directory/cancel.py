"""Cancelling a run: it saves, and ends with an exit code that no scheduler answers by starting it again."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from headway.core.coordination.lease import read_lease
from headway.core.coordination.outcomes import FINAL_CODES
from headway.core.coordination.owner import Owner, read_owner
from headway.core.coordination.preemption_board import CANCEL_KEY, Notice, post
from headway.core.errors import Cancelled, CheckpointError
from headway.core.files.atomic import write_json
from headway.core.machine.system import host_name
from headway.run.directory.ownership import is_free
from headway.run.directory.run_directory import attempt_folder
from headway.telemetry.record import NOT_ENDED, NOT_STARTED, RUNNING, Run

_REQUEST_FILE = ".cancel"


def request_cancel(run: Path, why: str = "") -> str | None:
    """Ask a run to save and end with exit code 7, wherever it trains.

    The request holds for the command that owns the run now, also while that waits between two attempts. A run that has
    ended is left as it is.

    Args:
        run: The run directory.
        why: Who asks, or why, for the run's record.

    Returns:
        How the run has ended, if it had before; None if it was asked.

    Raises:
        CheckpointError: there is no run, or nothing can be written there.
    """
    owner = read_owner(run)
    what = "cancelled" + (f": {why}" if why else "")
    if owner is None:
        raise CheckpointError("this is no run directory, or its run was never started", where=str(run), fix="check it")
    if (state := _ended(run, owner)) is not None:
        return state
    try:
        write_json(run / _REQUEST_FILE, {"what": what, "attempt": owner.attempt, "time": time.time()})
        post(attempt_folder(run, owner.attempt), Notice("cancel", what, key=CANCEL_KEY))
    except OSError as error:
        raise CheckpointError(
            f"the request cannot be written: {error.strerror or error}", where=str(run), fix="make room there"
        ) from error
    return None


def _ended(run: Path, owner: Owner) -> str | None:
    """Return the state of a run that no command will continue by itself; None if one may."""
    record = Run(run)
    if record.state in (RUNNING, NOT_ENDED, NOT_STARTED):
        return None
    newest = record.attempts[-1]
    if newest.number != owner.attempt:  # the next one is about to begin
        return None
    if newest.exit_code in (0, *FINAL_CODES):
        return record.state
    # A command may wait before its next attempt. Its lease outlasts it; a lock on this machine does not.
    lease = read_lease(run)
    may_wait = lease is not None and lease.is_valid
    if may_wait and not (owner.host == host_name() and is_free(run)):
        return None
    return record.state


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

"""How a launched job ends: waiting for that, and having it save and stop, so that no machine has the run any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.clouds.launchers.launcher import OVER, Handle, JobState, Launcher, find_launcher
from headway.clouds.launchers.record import read_handle, request_save_and_stop
from headway.core.console import notice, warning
from headway.core.errors import Cancelled, ConfigError
from headway.core.files.locks import lock_file
from headway.core.process.waiting import wait_until
from headway.run.directory.audit import record
from headway.run.directory.run_directory import LAUNCH_FOLDER
from headway.telemetry.record import Run, is_run

#: Time between two questions about a job: short at first, for a job that ends at once.
_FIRST_LOOK_SECONDS = 1.0
_LONGEST_LOOK_SECONDS = 15.0
#: How long an engine may take to remove a job whose time to save is over.
_REMOVAL_SECONDS = 60.0


def find_launched(run: Path) -> tuple[Launcher, Handle]:
    """Return the launcher and the handle of a run.

    Raises:
        ConfigError: it was not launched from here.
    """
    handle = read_handle(run)
    if handle is None:
        raise ConfigError(
            "the run was not launched from here: it has no launch.json",
            where=str(run),
            fix="name the run directory of a launch; headway runs list shows the runs",
        )
    return find_launcher(handle.target), handle


@contextmanager
def only_one(run: Path, name: str) -> Iterator[None]:
    """Have one process at a time do something with the launches of a run.

    Args:
        run: The run directory.
        name: The command, for the message and the name of the lock.

    Raises:
        ConfigError: another process does it, or the folder cannot be written.
    """
    path = run / LAUNCH_FOLDER / f".{name}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file(path)
    except BlockingIOError:
        raise ConfigError(
            f"another headway {name} has this run", where=str(run), fix="wait for its end, or stop it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the run cannot be locked: {error.strerror or error}", where=str(path), fix="choose another runs=..."
        ) from None
    with file:
        yield


def wait_for_end(launcher: Launcher, handle: Handle) -> JobState:
    """Wait until a job is over, and say what it waits for. An engine that does not answer is asked again."""
    pause = _FIRST_LOOK_SECONDS
    trouble = ""
    said = ""
    while True:
        try:
            state = launcher.status(handle)
            what = f"its state is unknown: {state.engine}" if state.state == "unknown" else ""
        except ConfigError as error:
            state = JobState("unknown", error.what)
            what = error.what
        if state.state in OVER:
            return state
        if what and not trouble:
            warning(f"{handle.id} on {handle.target}: {what}; asking again")
        trouble = what
        if state.state == "waiting" or (said and state.state == "running"):
            words = state.engine if state.state == "waiting" else "running"
            if words != said:
                notice(f"{handle.id} on {handle.target}: {words}")
            said = words
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)


def exit_code_of(state: JobState, handle: Handle, run: Path) -> int:
    """Return the exit code for a job that is over: that of its newest attempt if the run directory is here, else 0 for
    one that has finished, 7 for one that was cancelled, and 1."""
    if state.state in ("finished", "cancelled"):
        return 0 if state.state == "finished" else Cancelled.exit_code
    attempts = Run(run).attempts if is_run(run) else []
    code = next((one.exit_code for one in reversed(attempts) if (one.started or 0) >= handle.launched), None)
    if code is None or (code == 0 and state.state == "failed"):
        return 1
    return code


def stop_launched(run: Path, why: str) -> JobState:
    """Have a launched run save, remove its job, and return once no machine has it.

    The run ends with exit code 7 where its directory can be reached, so that no engine starts it again meanwhile; the
    same launch continues it.

    Args:
        run: The run directory.
        why: Who asks, or why, for the records.

    Returns:
        The job's last state; `finished` if it came to its end before.

    Raises:
        ConfigError: the engine refuses it, or still has the job after the time to save.
    """
    launcher, handle = find_launched(run)
    before = launcher.status(handle)
    # Written first: also a stop that fails half-way was somebody's.
    record(run, "cancel", anchors=True, target=handle.target, id=handle.id, why=why)
    if request_save_and_stop(run, why, handle.grace_seconds):
        notice("the run has saved and stopped")
    launcher.cancel(handle)
    state = before

    def is_over() -> bool:
        nonlocal state
        state = launcher.status(handle)
        return state.state in OVER

    if not wait_until(is_over, handle.grace_seconds + _REMOVAL_SECONDS, 1.0):
        raise ConfigError(
            f"{handle.id} is not over on {handle.target}: {state.engine}",
            where=str(run),
            fix=f"headway launch status {run} shows how it is; headway launch cancel {run} tries again",
        )
    return before if before.state in OVER else state

"""Following runs into trackers: a thread for each run and tracker, since a slow one must not hold up the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.config.sections.track import TrackConfig
from headway.core.console import warning
from headway.core.errors import HeadwayError
from headway.tracking.cursor import CursorFile, InUse, cursor_name
from headway.tracking.follower import Follower, Waiting
from headway.tracking.sinks import make_sink, resolve

#: Seconds between tries to get a cursor that another follower holds.
_LOCK_SECONDS = 2.0


def follow(
    path: Path,
    config: TrackConfig,
    where: str,
    *,
    report: Callable[[str], None],
    waiting: Waiting,
    waits_for_others: bool = False,
) -> None:
    """Follow one run into one tracker until the run is over and all has arrived.

    Args:
        path: The run directory.
        config: The tracker.
        where: Its place in the config or the command, for errors.
        report: Called with lines for people.
        waiting: How to wait.
        waits_for_others: Wait for another follower of the same run and tracker to end, instead of refusing.

    Raises:
        HeadwayError: the tracker refuses, or another follower is at work.
    """
    target = resolve(config, where)
    cursor = _locked(path, cursor_name(target.name, target.place), waiting, waits_for_others)
    if cursor is None:
        return
    try:
        sink = make_sink(config, path, where)
        Follower(path, sink, target.label, cursor, report=report, waiting=waiting).run()
    finally:
        cursor.close()


def _locked(path: Path, name: str, waiting: Waiting, waits: bool) -> CursorFile | None:
    while not waiting.must_stop():
        try:
            return CursorFile(path, name)
        except InUse:
            if not waits:
                raise
            waiting.sleep(_LOCK_SECONDS)
    return None


def follow_all(
    runs: Sequence[tuple[Path, Waiting]],
    trackers: Callable[[Path], Sequence[TrackConfig]],
    report: Callable[[str], None],
    *,
    waits_for_others: bool = False,
) -> list[HeadwayError]:
    """Follow several runs, each into its trackers, and return the errors.

    Args:
        runs: Run directories, and how to wait for each.
        trackers: Returns the trackers of a run.
        report: Called with lines for people, from several threads.
        waits_for_others: See `follow`.
    """
    errors: list[HeadwayError] = []

    def work(path: Path, config: TrackConfig, where: str, waiting: Waiting) -> None:
        try:
            follow(path, config, where, report=report, waiting=waiting, waits_for_others=waits_for_others)
        except HeadwayError as error:
            errors.append(error)
        except Exception as error:  # otherwise the thread would end unseen, as if all had arrived
            errors.append(HeadwayError(f"{config.name}: {type(error).__name__}: {error}", where=str(path)))

    threads = [
        threading.Thread(
            target=work,
            args=(path, config, f"track.{number}", waiting),
            name=f"headway-track-{number}",
            daemon=True,  # a client that hangs must not keep the process
        )
        for path, waiting in runs
        for number, config in enumerate(trackers(path))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)  # so that a signal is handled meanwhile
    return errors


def raise_first(errors: Sequence[HeadwayError]) -> None:
    """Raise the first of some errors, if there is any, after a warning of each other one."""
    for error in errors[1:]:
        warning(error.what)
    if errors:
        raise errors[0]

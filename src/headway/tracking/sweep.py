"""The end of runs that no follower sent: those whose machine died with their follower.

At the tracker such a run would be running for ever. It is followed once more, on any machine that sees its directory:
what is missing arrives, and then its status.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headway.config.sections.track import TrackConfig
from headway.core.console import notice, warning
from headway.core.errors import ConfigError, HeadwayError
from headway.core.process.command import module_command
from headway.telemetry.record import Run, check_runs_folder, is_run
from headway.tracking.cursor import InUse, cursor_name, unfinished
from headway.tracking.follow import follow_all, raise_first
from headway.tracking.follower import Waiting, is_live
from headway.tracking.sinks import parse_trackers, resolve

#: How long to try to reach a tracker.
_PATIENCE_SECONDS = 30.0
#: Time between two sweeps of an exporter.
_EVERY_SECONDS = 300.0


def sweep(folders: Sequence[Path], to: Sequence[str]) -> None:
    """Send the rest and the end of runs that are not running, to trackers that show them as running.

    Args:
        folders: Folders of runs, or run directories.
        to: Items of `track` in YAML, for runs whose config does not name their trackers.

    Raises:
        HeadwayError: there is no such folder, or a tracker refuses or does not answer.
    """
    given = parse_trackers(to)
    runs = _runs_in(folders)
    due = {path: names for path in runs if (names := _due(path))}
    trackers: dict[Path, list[TrackConfig]] = {}
    for path, names in due.items():
        known = _by_cursor([*given, *_of_config(path)])
        trackers[path] = [known[name] for name in names if name in known]
        for name in names.keys() - known.keys():
            warning(f"{path}: {names[name]} may show it as running; --to names the tracker")
    waiting = Waiting(lambda: True, patience_seconds=_PATIENCE_SECONDS)
    found = follow_all([(path, waiting) for path in due], trackers.__getitem__, warning)
    # Another follower that is at work sends the end itself.
    errors = [error for error in found if not isinstance(error, InUse)]
    for path, names in due.items():
        for name in sorted(names.keys() - unfinished(path).keys()):
            notice(f"{path}: sent its end to {names[name]}")
    raise_first(errors)
    if not due:
        notice("no tracker shows a run as running that has ended")


def _runs_in(folders: Sequence[Path]) -> list[Path]:
    found = []
    for folder in folders:
        check_runs_folder(folder)
        found += [folder] if is_run(folder) else [path for path in sorted(folder.iterdir()) if is_run(path)]
    # A run may have another name, as by a link `latest`.
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def _due(path: Path) -> dict[str, str]:
    """Return the trackers that wait for the end of a run; none while it runs."""
    names = unfinished(path)
    return {} if not names or is_live(path) else names


def _of_config(path: Path) -> list[TrackConfig]:
    try:
        return [TrackConfig.model_validate(item) for item in Run(path).get("track") or []]
    except (TypeError, ValueError):
        return []


def _by_cursor(configs: Sequence[TrackConfig]) -> dict[str, TrackConfig]:
    """Return trackers by the names of their cursors; those whose address this environment does not know are absent."""
    found: dict[str, TrackConfig] = {}
    for config in configs:
        try:
            target = resolve(config, "--to")
        except ConfigError:
            continue
        found.setdefault(cursor_name(target.name, target.place), config)
    return found


def sweep_forever(folder: Path) -> None:
    """Sweep a folder again and again, in a thread: as a command, since clients of trackers take memory and time."""
    threading.Thread(target=_sweep_forever, args=(folder, threading.Event()), name="headway-sweep", daemon=True).start()


def _sweep_forever(folder: Path, end: threading.Event) -> None:
    while True:
        with suppress(OSError, HeadwayError):  # the folder may be out of reach for a while
            if any(_due(path).keys() & _by_cursor(_of_config(path)).keys() for path in _runs_in([folder])):
                subprocess.run(module_command("headway", "track", "--sweep", str(folder)), check=False)
        if end.wait(_EVERY_SECONDS):
            return

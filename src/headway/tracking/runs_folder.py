"""All runs of a folder as they stand, read again and again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from headway.telemetry.record import NOT_ENDED, RUNNING, STUDY_FILE, STUDY_RUNS, check_runs_folder, is_run
from headway.tracking.live_run import LiveRun, Snapshot

#: How long a run is shown after its last sign of life, once it has ended ...
ENDED_SECONDS = 3600.0
#: ... and when its end cannot be seen from this machine: an alert must have time to fire.
_SILENT_SECONDS = 86400.0


class RunsFolder:
    """Follows the run directories directly in a folder, and those of its studies; those that appear later too.

    A run of a study has the study's name before its own: `my-study/0003`.

    Args:
        path: The folder.
        newest: Read the newest records of each run only.
        ended_seconds: How long a run that has ended stays.

    Raises:
        CheckpointError: there is no such folder.
    """

    def __init__(self, path: Path, *, newest: bool = False, ended_seconds: float = ENDED_SECONDS) -> None:
        check_runs_folder(path)
        self.path = path
        self._newest = newest
        self._ended_seconds = ended_seconds
        self._runs: dict[str, LiveRun] = {}
        self._gone: dict[str, int] = {}
        self._lock = threading.Lock()

    def refresh(self, now: float | None = None) -> list[Snapshot]:
        """Read what is new, and return the runs by name."""
        now = time.time() if now is None else now
        with self._lock:
            return [snapshot for name in self._names() if (snapshot := self._look(name, now)) is not None]

    def _names(self) -> list[str]:
        listed = _inside(self.path)
        studies = [path for path in [self.path, *listed] if _is_study(path)]
        trials = [path for study in studies for path in _inside(study / STUDY_RUNS)]
        names = sorted(str(path.relative_to(self.path)) for path in [*listed, *trials] if self._is_own(path))
        for name in self._runs.keys() - set(names):
            del self._runs[name]
        return names

    def _is_own(self, path: Path) -> bool:
        """Return whether a path is a run that has no other name in this folder, as a link `latest` would give it."""
        if path.is_symlink() and path.resolve().parent == self.path.resolve():
            return False
        return str(path.relative_to(self.path)) in self._runs or is_run(path)

    def _look(self, name: str, now: float) -> Snapshot | None:
        """Return a run; None if it ended too long ago. Such a run is read again when a new attempt begins."""
        path = self.path / name
        changed = _changed(path / "attempts")
        if self._gone.get(name) == changed:
            return None
        run = self._runs.get(name)
        if run is None:
            shown = name.replace(f"/{STUDY_RUNS}/", "/").removeprefix(f"{STUDY_RUNS}/")
            run = self._runs[name] = LiveRun(path, newest=self._newest, name=shown)
        state, seen = run.last_sign_of_life()
        if state != RUNNING and seen < now - max(self._ended_seconds, _SILENT_SECONDS if state == NOT_ENDED else 0.0):
            self._gone[name] = changed
            self._runs.pop(name)
            return None
        self._gone.pop(name, None)
        return run.refresh(now)


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _is_study(path: Path) -> bool:
    try:
        return (path / STUDY_FILE).is_file()
    except OSError:  # a folder without permission
        return False


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0

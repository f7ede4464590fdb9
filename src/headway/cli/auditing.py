"""Which verbs change a run, or take its model elsewhere: they leave a line in the run's audit log before they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

#: Verb -> the argument that names its run, or several; a place that is no run directory has no log.
CHANGES = {
    "runs cancel": "run",
    "runs tag": "paths",
    "checkpoints prune": "run",
    "checkpoints copy": "source",
    "export": "run",
    "merge": "run",
    "compress": "model",
    "push": "model",
    "registry add": "model",
}
#: Verbs that learn only later which run they change, or share it with functions of Python. Their line is written where
#: that is known: by `RunDirectory.begin_attempt`, or by the launcher.
RECORDED_BELOW = frozenset(
    (
        "train",
        "quickstart",
        "checkpoints restore",
        "checkpoints reseal",
        "launch run",
        "launch bench",
        "launch cancel",
        "spot",
    )
)
#: Arguments without which a verb changes nothing, and one with which it changes nothing.
_ONLY_WITH = {"runs tag": ("add", "remove", "note")}
_DRY_RUN = "dry_run"
_NOTHING: tuple[object, ...] = (None, [], ())


def recorded(verb: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a verb, which then writes its line; the same function for a verb that changes no run."""
    if verb not in CHANGES:
        return callback

    @wraps(callback)
    def run(*words: Any, **arguments: Any) -> Any:
        for place in _runs_of(verb, arguments):
            _record(place, verb)
        return callback(*words, **arguments)

    return run


def _runs_of(verb: str, arguments: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the directories that a call of a verb is about to change."""
    needed = _ONLY_WITH.get(verb)
    if arguments.get(_DRY_RUN) or (needed and all(arguments.get(name) in _NOTHING for name in needed)):
        return
    given = arguments.get(CHANGES[verb])
    for place in given if isinstance(given, list) else [given]:
        path = Path(str(place))
        yield path.parent if path.name == "checkpoints" else path


def _record(place: Path, verb: str) -> None:
    # Imported here, since every command loads this module.
    from headway.run.directory.audit import record
    from headway.run.directory.run_directory import command_line
    from headway.telemetry.record import is_run

    if is_run(place):
        record(place, verb, anchors=True, command=command_line())

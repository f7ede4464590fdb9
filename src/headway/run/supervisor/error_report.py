"""The error that ended a worker, on its way to the supervisor: by a file, a message, or both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headway.core.coordination.heartbeat import current_step
from headway.core.errors import HeadwayError
from headway.run.supervisor.restart_policy import frames_of


@dataclass(frozen=True)
class ErrorReport:
    """The error that ended a worker, as the worker reports it, or the process that waited for it."""

    exit_code: int
    what: str
    where: str | None = None
    fix: str | None = None
    rank: int | None = None
    step: int | None = None
    """Finished steps of the worker."""
    type: str | None = None
    """Name of the exception's type."""
    frames: Sequence[str] | None = None
    """Of a crash: frames of Headway and of the user's code, innermost last. None for a deliberate error."""
    traceback: str | None = None
    signal: int | None = None
    """The signal that killed the worker."""

    @classmethod
    def of(cls, error: BaseException, rank: int, traceback: str | None = None) -> ErrorReport:
        """Return the report of an error in this process."""
        if isinstance(error, WorkerDied) and error.report is not None:
            return replace(error.report, exit_code=error.exit_code, what=error.what, where=error.where, fix=error.fix)
        name = type(error).__name__
        if isinstance(error, HeadwayError):
            return cls(error.exit_code, error.what, error.where, error.fix, rank, current_step(), name)
        frames = frames_of(error)
        return cls(1, f"{name}: {error}", None, None, rank, current_step(), name, frames, traceback)

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


class WorkerDied(HeadwayError):
    """The error that ended a worker in another process."""

    exit_code = 1
    report: ErrorReport | None = None
    """What is known of it."""


def most_telling_report(folder: Path, spare: Iterable[Mapping[str, Any]] = ()) -> ErrorReport | None:
    """Return the most informative report: a deliberate error rather than the crashes that follow from it.

    Args:
        folder: Has the reports of workers, `error-<rank>.json`.
        spare: Records of reports that could not be written there.
    """
    reports = [ErrorReport(**record) for record in spare]
    with suppress(OSError):
        reports += [ErrorReport(**json.loads(path.read_bytes())) for path in sorted(folder.glob("error-*.json"))]
    return min(reports, key=lambda report: (report.exit_code == 1, report.rank), default=None)

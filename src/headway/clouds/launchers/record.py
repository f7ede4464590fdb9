"""What the run directory holds of a launch: the handle, the audit log, and how far the run is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.clouds.launchers.launcher import Handle
from headway.core.audit import AUDIT_FILE
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import read_json_lines, read_json_object
from headway.core.process.waiting import wait_until
from headway.run.directory.cancel import request_cancel
from headway.run.directory.run_directory import LAUNCH_FILE
from headway.telemetry.record import NOT_ENDED, RUNNING, Run, is_run
from headway.telemetry.summary import median

#: An attempt in one of these may still answer: the second is what a machine sees of another one's.
_ALIVE = (RUNNING, NOT_ENDED)


def write_handle(run: Path, handle: Handle) -> None:
    """Write the handle of a launched run into its directory."""
    write_json(run / LAUNCH_FILE, asdict(handle), exact=True)


def read_handle(run: Path) -> Handle | None:
    """Return the handle of a run; None if none was launched.

    Raises:
        ConfigError: the file is no handle.
    """
    path = run / LAUNCH_FILE
    try:
        found = read_json_object(path)
        known = {name: found[name] for name in Handle.__dataclass_fields__ if name in found}
        return Handle(**known)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the handle of the launch cannot be read: {error}", where=str(path), fix="remove it"
        ) from None


def audited(run: Path) -> list[Mapping[str, Any]]:
    """Return the lines of the audit log."""
    return list(read_json_lines(run / AUDIT_FILE))


def request_save_and_stop(run: Path, why: str, seconds: float) -> bool:
    """Cancel a run where its directory can be reached, and wait until it has saved.

    Args:
        run: The run directory.
        why: Who asks, for the run's record.
        seconds: How long to wait for the end of the attempt.

    Returns:
        Whether the attempt has ended.
    """
    if not is_run(run) or (found := Run(run)).state not in _ALIVE:
        return False
    number = max(found.attempt_records)

    def has_ended() -> bool:
        now = Run(run)
        return now.state not in _ALIVE or max(now.attempt_records) > number

    try:
        request_cancel(run, why)
    except CheckpointError:
        return False
    return wait_until(has_ended, seconds, 1.0)


@dataclass(frozen=True)
class Progress:
    """How far a run is, as its directory shows it; None is unknown."""

    attempt: int | None = None
    state: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    eta_seconds: float | None = None
    spent_usd: float | None = None
    saved_seconds_ago: float | None = None


def progress_of(run: Path) -> Progress:
    """Read how far a run is; everything is unknown where its directory cannot be reached."""
    if not is_run(run):
        return Progress()
    found = Run(run)
    metrics = found.newest_metrics()
    step = found.step
    total = found.total_steps
    pace = median(metrics, "speed/step_seconds")
    saved = [checkpoint.time for checkpoint in found.checkpoints if checkpoint.time is not None]
    loss = metrics.last("train/loss")
    return Progress(
        attempt=max(found.attempt_records, default=None),
        state=found.state,
        step=step,
        total_steps=total,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        eta_seconds=None if pace is None or total is None else max(0, total - step) * pace,
        spent_usd=metrics.last("cost/spent_usd"),
        saved_seconds_ago=max(0.0, time.time() - max(saved)) if saved else None,
    )


def save_seconds_of(run: Path) -> float | None:
    """Return how long the last save of a run took; None if it has not been saved here."""
    return Run(run).newest_metrics().last("checkpoint/write_seconds") if is_run(run) else None

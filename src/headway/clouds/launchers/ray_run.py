"""Read what processes of Ray need of a run: metrics and checkpoints; end its process, and wait for its owner."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.format.folders import checkpoint_folders
from headway.checkpoint.format.manifest import MANIFEST
from headway.core.coordination.launch_variables import NODE_NUMBERS, OF_A_WORKER
from headway.core.errors import CheckpointError
from headway.core.files.foreign import as_number
from headway.core.process.waiting import wait_until
from headway.run.directory.ownership import OwnerLock
from headway.run.directory.run_directory import RunDirectory
from headway.telemetry.metrics import read_records

#: The file in Ray's checkpoints that says where the run has its own.
POINTER = "headway.json"
#: How long a process of the run that a dead worker of Ray has left behind may take to save and end.
_OLD_OWNER_SECONDS = 120.0
#: How long a process that is asked to end may take to save.
END_SECONDS = 60.0


def own_variables() -> dict[str, str]:
    """Return the environment for a process of a run.

    Otherwise it would be taken for one worker, or numbered by Ray's own count of machines.
    """
    return {name: value for name, value in os.environ.items() if name not in (*OF_A_WORKER, *NODE_NUMBERS)}


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process of a run that is left: it saves first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_owner(run: Path) -> None:
    """Wait until the process of an earlier worker, which Ray has killed, has saved and released the run."""

    def is_free() -> bool:
        if not run.is_dir():
            return True
        try:
            OwnerLock.take(run).release()
        except CheckpointError:
            return False
        return True

    if (run / "attempts").is_dir():
        wait_until(is_free, _OLD_OWNER_SECONDS, 0.5)


def newest_metrics(run: Path) -> dict[str, float]:
    """Return the newest value of every metric."""
    found: dict[str, float] = {}
    for record in read_records(run, newest=True):
        found |= dict(numbers_in(record))
    return found


def numbers_in(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a record."""
    for name, value in record.items():
        number = as_number(value)
        if number is not None and math.isfinite(number):
            yield name, value


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that is complete; None if there is none."""
    folders = checkpoint_folders(RunDirectory(run).checkpoints)
    found = [folder for folder in folders.values() if (folder / MANIFEST).exists()]
    return found[-1].absolute() if found else None

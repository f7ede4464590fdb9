"""The folders in a run's `checkpoints`: which claim to be checkpoints, and how one goes without leaving half of it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.checkpoint.format.manifest import step_of
from headway.core.faults import fault_point

#: A save in progress, or a checkpoint on its way out. Nobody reads these.
TEMPORARY = ".tmp-"
#: A checkpoint that steps aside while another of the same step takes its place. It counts as long as that is not there.
REPLACED = ".replaced-"


def checkpoint_folders(directory: Path) -> dict[int, Path]:
    """The folders that claim to be checkpoints, by rising step.

    Raises:
        OSError: the directory cannot be read.
    """
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    found = {step: name for name in names if (step := step_of(name)) is not None}
    # A replacement that was killed between its two renames.
    aside = {step: name for name in names if (step := step_of(name.removeprefix(REPLACED))) is not None}
    return {step: directory / name for step, name in sorted({**aside, **found}.items())}


@contextmanager
def pruning(directory: Path) -> Iterator[None]:
    """Keep others from looking for a checkpoint to go back to (they do so within this too) while one is about to go.

    Where a file system has no locks, that is not kept from them.
    """
    descriptor = -1
    try:
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a checkpoint, out of sight first, so that a kill never leaves half of one to be found."""
    hidden = folder.with_name(f"{TEMPORARY}discarded-{folder.name}")
    remove(hidden)
    folder.rename(hidden)
    fault_point("checkpoint.discard")
    remove(hidden)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

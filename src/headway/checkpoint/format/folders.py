"""Folders in a run's `checkpoints`: which are checkpoints by name, and how to remove one without leaving half of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from headway.checkpoint.format.manifest import step_of
from headway.core.files.atomic import exchange, sync_folder
from headway.core.files.locks import locked_folder
from headway.core.process.faults import fault_point

#: Prefix of a save in progress, and of a checkpoint that is being removed. Readers ignore both.
TEMPORARY = ".tmp-"
#: Prefix of a checkpoint that another one of the same step is replacing. It is valid until the other is in place.
REPLACED = ".replaced-"


def checkpoint_folders(directory: Path) -> dict[int, Path]:
    """Return the folders that are checkpoints by name, in ascending order of steps.

    Raises:
        OSError: The directory cannot be read.
    """
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    found = {step: name for name in names if (step := step_of(name)) is not None}
    # A replacement that was killed between its two renames.
    aside = {step: name for name in names if (step := step_of(name.removeprefix(REPLACED))) is not None}
    return {step: directory / name for step, name in sorted({**aside, **found}.items())}


@contextmanager
def pruning(directory: Path) -> Iterator[None]:
    """Lock a `checkpoints` folder while checkpoints are removed.

    The search for a checkpoint to roll back to takes this lock too, so that the one it finds is not removed meanwhile.
    A file system without locks gives no such protection.
    """
    with ExitStack() as lock:
        with suppress(OSError):
            lock.enter_context(locked_folder(directory))
        yield


def discard(folder: Path) -> None:
    """Remove a checkpoint; it is hidden first, so that a kill never leaves half of one visible."""
    hidden = folder.with_name(f"{TEMPORARY}discarded-{folder.name}")
    remove(hidden)
    folder.rename(hidden)
    fault_point("checkpoint.discard")
    remove(hidden)


def replace_checkpoint(folder: Path, new: Path) -> None:
    """Put a complete folder with a hidden name in the place of a checkpoint, and remove the checkpoint.

    Where the system can swap two names, one of them is in the place at every moment. Elsewhere the old one is renamed
    first, and is found by that name (`checkpoint_folders`) until the new one is in its place.
    """
    old = new
    if not exchange(new, folder):
        old = folder.with_name(REPLACED + folder.name)
        folder.rename(old)
        fault_point("checkpoint.replace")
        new.rename(folder)
    sync_folder(folder.parent)
    with suppress(OSError):  # the new one is there, and the next save removes what is left of the old one
        discard(old)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

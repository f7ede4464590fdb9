"""Temporary folders and files in memory that disappear with the processes that use them, even if they are killed."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.core.errors import ConfigError, fix_for
from headway.core.files.locks import is_at

#: A file that stays locked as long as the folder is in use.
_LOCK = ".in-use"


@contextmanager
def scratch_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """Make an empty folder for the length of a block, and remove those of killed processes with the same prefix.

    Args:
        prefix: Prefix of the name of the folder that holds it, next to the lock.
        within: Folder of that one; the system's folder for temporary files when not given.

    Raises:
        ConfigError: the system offers no folder for temporary files.
        OSError: the folder cannot be made in `within`.
    """
    parent = _place_of_temporary_files() if within is None else within
    for folder in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            _remove_if_left(folder)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        if within is not None:
            raise
        raise _no_place(error, parent) from error
    descriptor = -1
    try:
        with suppress(OSError):  # without locks on this file system, no other process removes the folder either
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        empty = folder / "files"
        empty.mkdir(0o700)
        yield empty
    finally:
        # Processes that were just killed may still be writing there.
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor >= 0:
            os.close(descriptor)


def _place_of_temporary_files() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # it tries several folders, and does not say why it rejected each
        raise _no_place(error, Path(os.environ.get("TMPDIR", "/tmp"))) from error


def _no_place(error: OSError, where: Path) -> ConfigError:
    return ConfigError(
        f"a temporary folder cannot be made: {error.strerror or error}",
        where=str(where),
        fix=fix_for(error, "make room there, or set TMPDIR to a folder that can be written"),
    )


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of this user that is no longer in use; one without the lock file may be something else."""
    lock = folder / _LOCK
    if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(lock, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def file_in_memory(name: str) -> tuple[int, Path] | None:
    """Create a file in memory that disappears with the last process that has it open.

    Returns:
        The open descriptor, and a path by which other processes of this user on this machine can open the file while
        this process has it open. None where the system offers no such file or path.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    with suppress(OSError):
        # The path fails where only root may follow it (PR_SET_DUMPABLE), or /proc belongs to another process namespace.
        if path.parent.stat().st_uid == os.geteuid() and is_at(path, file):
            return file, path
    os.close(file)
    return None

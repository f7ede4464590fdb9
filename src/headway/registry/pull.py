"""Copies of a version in a folder of the user's choice."""

from __future__ import annotations

from pathlib import Path

from headway.core.errors import ConfigError, fix_for
from headway.core.files.scratch import scratch_folder
from headway.models.versions import ResolvedVersion, fetch


def pull_to(found: ResolvedVersion, folder: Path) -> Path:
    """Fetch a version into a new folder, which appears only when every byte is there and verified.

    Raises:
        ConfigError: The folder exists, or cannot be made.
        CheckpointError: A file is missing or was changed.
    """
    if folder.exists():
        raise ConfigError("the folder exists already", where=str(folder), fix="name a new one, or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".pulling-", folder.parent) as scratch:
            fetch(found, scratch)
            scratch.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be written: {error.strerror or error}",
            where=str(error.filename or folder),
            fix=fix_for(error, "free space there, or name another one"),
        ) from error
    return folder

"""Paths: this user's cache, `~`, links, and names that another machine may just have created."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from headway.core.errors import ConfigError


def user_cache() -> Path:
    """Return this user's cache folder on this machine, for files that can be computed again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


def expanded(path: str | Path, where: str | None = None) -> Path:
    """Expand `~` and `~user` in a path as the shell does.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"'{path}' has no meaning here: {error}", where=where, fix="name the folder") from None


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Link a file that is never rewritten to another name, or copy it where that is impossible.

    Raises:
        OSError: It can be neither linked nor copied.
    """
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def is_there(path: Path, folders: int = 1) -> bool:
    """Return whether a file exists that another machine may just have created.

    An NFS client caches for up to a minute that a name is absent. Opening the folder makes it ask the server again
    (nfs(5), close-to-open consistency).

    Args:
        folders: How many of the folders above the file may be new too.
    """
    for folder in reversed(path.parents[:folders]):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))
    return path.exists()

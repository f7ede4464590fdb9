"""The folder of an export: whole or not there, and never in the place of a person's own files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files import sha256_file, sync_folder, write_json
from headway.core.foreign import LISTING_BYTES, read_json
from headway.core.scratch import scratch_folder

#: Lists what an export wrote, so that the next one to the same folder knows what is not a person's own.
MARKER = "headway_export.json"


def check_not_foreign(folder: Path) -> None:
    """Refuse a place that an export cannot take, or whose content is not an earlier export's.

    Raises:
        ConfigError: it is a file, a mount point, or holds something else than an earlier export, as it was written.
    """
    if folder.is_file():
        raise ConfigError("the output folder is a file", where=str(folder), fix="give a new folder")
    if os.path.ismount(folder):
        raise ConfigError(
            "the output folder is a mount point, in whose place no other folder can be put",
            where=str(folder),
            fix=f"give a folder inside it: {folder / 'export'}",
        )
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    written = _written(folder)
    foreign = [name for name in names if not _is_written(folder / name, written)]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ConfigError(
            "the output folder holds something else than an earlier export",
            where=f"{folder}: {', '.join(foreign[:3])}{more}",
            fix="give a new folder, or move these files away",
        )


def mark(folder: Path) -> None:
    """Write down what is in the folder of an export."""
    write_json(
        folder / MARKER, {"files": {path.name: sha256_file(path) for path in sorted(folder.iterdir())}}, exact=True
    )


def _written(folder: Path) -> dict[str, str | None]:
    """Name -> SHA-256 of what an earlier export wrote; None where it has listed names alone."""
    try:
        files: Any = read_json(folder / MARKER, LISTING_BYTES)["files"]
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError):
        files = None  # nobody knows, so all is a person's own
    listed = files if isinstance(files, dict) else dict.fromkeys(files) if isinstance(files, list) else {}
    return {**listed, MARKER: None}


def _is_written(path: Path, written: dict[str, str | None]) -> bool:
    """Whether an earlier export wrote this file: weights trained further may have been saved under its name."""
    if not path.is_file() or path.name not in written:
        return False
    digest = written[path.name]
    return digest is None or sha256_file(path) == digest


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Make a new folder, which takes the place of `folder` when the block ends without an error.

    What a killed export has left beside the folder goes; where it was killed while the two changed places, the former
    folder is put back first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not in the scratch folder, which the next export removes: until the new one is in place it is the only one.
    old = folder.with_name(f".{folder.name}.before-export")
    with scratch_folder(f".{folder.name}.", folder.parent) as scratch:
        if old.exists():
            shutil.rmtree(old) if folder.exists() else old.rename(folder)
        building = scratch / "new"
        building.mkdir()
        try:
            yield building
            sync_folder(building)
            if folder.exists():
                folder.rename(old)
            building.rename(folder)
            sync_folder(folder.parent)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)  # if that fails too it is left where it is
            raise
        shutil.rmtree(old, ignore_errors=True)

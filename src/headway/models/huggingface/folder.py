"""The folder of a Hugging Face checkpoint: one to read, or the output of an export, which is complete or absent and
never takes the place of the user's own files."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.atomic import sync_folder, write_json
from headway.core.files.foreign import LISTING_BYTES, read_json
from headway.core.files.hashes import sha256_file
from headway.core.files.scratch import scratch_folder
from headway.core.hub import or_on_hub

#: Lists the files of an export, so that the next export to the folder can tell them from the user's own files.
MARKER = "headway_export.json"


def check_is_there(folder: Path) -> None:
    """Check that a folder has the config of a Hugging Face checkpoint.

    Raises:
        ConfigError: it has none; the error says where the model may be.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError("there is no Hugging Face checkpoint", where=str(path), fix=_where_it_may_be(folder))


def _where_it_may_be(folder: Path) -> str:
    """Return the fix for a folder without a checkpoint."""
    run = next((place for place in (folder, *folder.absolute().parents[:2]) if _is_run(place)), None)
    if run is not None:
        return f"this belongs to a run of Headway: headway export {run}, then model.from_pretrained={run / 'export'}"
    return f"give a folder with config.json{or_on_hub(folder)}"


def _is_run(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file()


def check_not_foreign(folder: Path) -> None:
    """Check that an export may create or replace the folder.

    Raises:
        ConfigError: it is a file, a mount point, or holds anything but an unchanged earlier export.
    """
    if folder.is_file():
        raise ConfigError("the output folder is a file", where=str(folder), fix="give a new folder")
    if os.path.ismount(folder):
        raise ConfigError(
            "the output folder is a mount point, which cannot be replaced by another folder",
            where=str(folder),
            fix=f"give a folder inside it: {folder / 'export'}",
        )
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    written = _written(folder)
    foreign = [name for name in names if not _is_written(folder / name, written)]
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ConfigError(
            "the output folder holds files that no earlier export wrote",
            where=f"{folder}: {', '.join(foreign[:3])}{more}",
            fix="give a new folder, or move these files away",
        )


def mark(folder: Path) -> None:
    """Record the files of an export and their digests in its folder."""
    write_json(
        folder / MARKER, {"files": {path.name: sha256_file(path) for path in sorted(folder.iterdir())}}, exact=True
    )


def _written(folder: Path) -> dict[str, str | None]:
    """Map each file name to the SHA-256 that an earlier export recorded; None if it recorded only names."""
    try:
        files: Any = read_json(folder / MARKER, LISTING_BYTES)["files"]
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError):
        files = None  # unreadable, so treat every file as the user's own
    listed = files if isinstance(files, dict) else dict.fromkeys(files) if isinstance(files, list) else {}
    return {**listed, MARKER: None}


def _is_written(path: Path, written: dict[str, str | None]) -> bool:
    """Return whether an earlier export wrote this file; weights trained further may have been saved under its name."""
    if not path.is_file() or path.name not in written:
        return False
    digest = written[path.name]
    return digest is None or sha256_file(path) == digest


def _let_others_read(building: Path, scratch: Path) -> None:
    """Give weights the permissions of any new file: safetensors makes files that only their owner can read."""
    usual = scratch / "permissions"
    usual.touch()
    mode = stat.S_IMODE(usual.stat().st_mode)
    for file in building.glob("*.safetensors"):
        file.chmod(mode)


@contextmanager
def published(folder: Path, prove: Callable[[Path], None]) -> Iterator[Path]:
    """Create a new folder that replaces `folder` when the block ends without an error and the result is proven.

    No model is published in another way, so `prove` compares what was written with the model that it was written from
    (`headway.models.written`); what it raises leaves everything as it was.

    Removes the remains of a killed export next to the folder. If that export was killed between its two renames, the
    former folder is restored first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not in the scratch folder, which the next export removes: until the rename this is the only complete copy.
    old = folder.with_name(f".{folder.name}.before-export")
    with scratch_folder(f".{folder.name}.", folder.parent) as scratch:
        if old.exists():
            shutil.rmtree(old) if folder.exists() else old.rename(folder)
        building = scratch / "new"
        building.mkdir()
        try:
            yield building
            prove(building)
            _let_others_read(building, scratch)
            sync_folder(building)
            if folder.exists():
                folder.rename(old)
            building.rename(folder)
            sync_folder(folder.parent)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)  # if this fails too, the former folder stays under its other name
            raise
        shutil.rmtree(old, ignore_errors=True)

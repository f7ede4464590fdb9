"""The files of a folder that become a version: known kinds, regular, within the folder, and readable without a pickle.

A folder may come from anywhere. Nothing in it is executed, and no link leads out of it into other files of this user.
"""

from __future__ import annotations

from pathlib import Path

from headway.checkpoint.format.reading import open_shard
from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.files.foreign import LISTING_BYTES, read_json_object
from headway.core.format import format_bytes, printable
from headway.models.hub.push import model_files
from headway.models.huggingface.folder import MARKER
from headway.models.versions.records import MOST_FILES, SIGNATURE, is_file_name

#: Files that are parsed when a model is loaded.
_PARSED = ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")
#: Folders of the Hub's cache, whose files are links to blobs beside them.
_SNAPSHOTS = "snapshots"
_BLOBS = "blobs"


def files_to_register(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a model's folder by name, and the names of those that are left out.

    Raises:
        ConfigError: The folder holds no model, or a file that cannot be one of a version.
        CheckpointError: The weights are pickled, or damaged.
    """
    found, left_out = model_files(folder)
    wanted = [path for path in found if path.suffix != ".py" and path.name != SIGNATURE]
    left_out += [path.name for path in found if path.suffix == ".py"]
    if len(wanted) > MOST_FILES:
        raise _refused(folder, f"it has {len(wanted):,} files, and a version at most {MOST_FILES:,}")
    root = _root(folder)
    for path in wanted:
        _check(path, root)
    if not any(path.suffix == ".safetensors" for path in wanted):
        raise _refused(folder, "it has no weights in safetensors")
    return {path.name: path for path in wanted}, sorted(set(left_out) - {MARKER})


def _root(folder: Path) -> Path:
    """Return the folder that links may lead to: the model's own, or its repository in the Hub's cache."""
    real = folder.resolve()
    is_snapshot = real.parent.name == _SNAPSHOTS and (real.parent.parent / _BLOBS).is_dir()
    return real.parent.parent if is_snapshot else real


def _check(path: Path, root: Path) -> None:
    name = printable(path.name)
    if not is_file_name(path.name):
        raise _refused(path.parent, f"{name} is no name for a file of a version")
    if not path.resolve().is_relative_to(root):
        raise _refused(path.parent, f"{name} is a link to a file outside the folder")
    if path.suffix == ".safetensors":
        with open_shard(path, "numpy") as shard:
            shard.keys()
        return
    size = path.stat().st_size
    if size > LISTING_BYTES:
        raise _refused(path.parent, f"{name} has {format_bytes(size)}, and at most {format_bytes(LISTING_BYTES)}")
    if path.name in _PARSED:
        try:
            read_json_object(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
            raise CheckpointError(f"{name} {why}", where=str(path), fix="export or download the model again") from None


def _refused(folder: Path, why: str) -> HeadwayError:
    return ConfigError(
        f"the folder cannot be registered: {why}", where=str(folder), fix="remove or replace what it names"
    )

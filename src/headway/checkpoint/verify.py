"""Verification of a local checkpoint: every byte is compared with the manifest's hashes."""

from __future__ import annotations

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.format.file_hash import is_as_written
from headway.checkpoint.format.manifest import Manifest, hash_tensor, read_manifest, step_of
from headway.checkpoint.format.reading import SavedTensors, contradiction, open_shard
from headway.checkpoint.format.sealing import VARIABLE, Undecipherable
from headway.core.errors import CheckpointError, ConfigError
from headway.core.machine.cores import usable_cores


@dataclass(frozen=True)
class Damage:
    """A defect of a checkpoint."""

    file: str
    what: str
    tensors: tuple[str, ...] = ()
    """The affected tensors, as far as they are known."""

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:5]) + (f" and {len(self.tensors) - 5} more" if len(self.tensors) > 5 else "")
        return f"{self.file} {self.what}" + (f" (tensors: {shown})" if shown else "")


@dataclass(frozen=True)
class Verification:
    """The result of verifying a checkpoint."""

    place: str
    """Folder or URL."""
    manifest: Manifest | None
    """None if it cannot be read or trusted."""
    damage: tuple[Damage, ...]

    @property
    def good(self) -> bool:
        """Whether there is no damage."""
        return not self.damage


def verify_checkpoint(
    path: Path, *, hashes: bool = True, tensors: bool = False, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Compare a checkpoint folder with its manifest. Damage is reported, never raised.

    Args:
        path: The folder.
        hashes: Whether to hash every file; if not, only names, sizes and headers are checked.
        tensors: Whether to also hash every tensor in a second pass, which shows the affected tensors of a damaged file.
        advance: Called with the number of bytes read since the last call.

    Raises:
        ConfigError: The checkpoint is encrypted, and the key is missing or wrong. This does not count as damage: a run
            that passed the checkpoint over would resume from an older one and then overwrite it.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            raise CheckpointError("is not a folder" if not path.is_symlink() else "is a symbolic link")
        manifest = read_manifest(path)
        # A killed replacement leaves the old checkpoint under another name.
        step = step_of(path.name.removeprefix(".replaced-"))
        if step is not None and step != manifest.step:
            raise CheckpointError(f"manifest.json belongs to step {manifest.step}")
    except CheckpointError as error:
        return Verification(str(path), None, (Damage(path.name, error.what),))

    def check(name: str) -> Damage | None:
        found = check_file(path, name, manifest, hashes=hashes, tensors=tensors)
        advance(manifest.files[name].bytes)
        return found

    with ThreadPoolExecutor(usable_cores()) as pool:
        damage = [found for found in pool.map(check, manifest.files) if found is not None]
    if tensors and not damage:
        damage = _check_tensors(path, manifest)
    return Verification(str(path), manifest, tuple(damage))


def check_file(
    folder: Path, name: str, manifest: Manifest, *, hashes: bool = True, tensors: bool = False
) -> Damage | None:
    """Return the damage of one file of a checkpoint, or None; arguments and errors are those of `verify_checkpoint`."""
    found = _check_file(folder, name, manifest, hashes)
    if found is not None and tensors:
        return Damage(name, found.what, _damaged_tensors(folder, name, manifest))
    return found


def _check_file(folder: Path, name: str, manifest: Manifest, hashes: bool) -> Damage | None:
    entry = manifest.files[name]
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return Damage(name, "is not a regular file")
        if status.st_size != entry.bytes:
            return Damage(name, f"has {status.st_size:,} bytes, {entry.bytes:,} were written")
        # The other cores check other files meanwhile.
        if hashes and not is_as_written(path, entry, max(1, usable_cores() // len(manifest.files))):
            return Damage(name, "has changed since it was written (its hash differs)")
        with open_shard(path, "numpy") as file:
            difference = contradiction(manifest, name, file)
    except FileNotFoundError:
        return Damage(name, "is missing")
    except OSError as error:
        return Damage(name, f"cannot be read: {error.strerror}")
    except Undecipherable as error:
        if hashes:  # the hash matched, so the bytes are intact and the key is wrong
            raise ConfigError(
                "it is encrypted with a key other than the given one",
                where=str(path),
                fix=f"set {VARIABLE} to the key that it was saved with",
            ) from None
        return Damage(name, error.what)
    except CheckpointError as error:
        return Damage(name, error.what)
    return Damage(name, difference) if difference else None


def _damaged_tensors(folder: Path, name: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the tensors of a damaged file whose bytes differ; all of its tensors if it cannot be opened."""
    parts = dict(manifest.slices_of(name))
    if (folder / name).is_symlink() or not (folder / name).is_file():
        return tuple(parts)
    try:
        with open_shard(folder / name) as file:

            def is_good(tensor: str) -> bool:
                # A slice has no hash of its own, so it counts as damaged.
                entry = manifest.tensors[tensor]
                if parts[tensor].shape != entry.shape:
                    return False
                try:
                    return hash_tensor(file.get_tensor(tensor)) == entry.sha256
                except CheckpointError:  # a part of a sealed file that cannot be decrypted
                    return False

            return tuple(tensor for tensor in parts if not is_good(tensor))
    except CheckpointError:
        return tuple(parts)


def _check_tensors(folder: Path, manifest: Manifest) -> list[Damage]:
    """Hash every tensor, one in memory per thread: a sealed checkpoint may be larger than the memory."""
    saved = SavedTensors(folder, manifest)

    def check(name: str) -> Damage | None:
        entry = manifest.tensors[name]
        if hash_tensor(saved.whole(name)) == entry.sha256:
            return None
        return Damage(entry.slices[0].file, "holds another tensor than was hashed", (name,))

    with ThreadPoolExecutor(usable_cores()) as pool:
        return [found for found in pool.map(check, manifest.tensors) if found is not None]

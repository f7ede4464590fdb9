"""Changing the key that a local checkpoint is encrypted or signed with, without a moment at which a kill loses it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.format import sealing, signing
from headway.checkpoint.format.folders import TEMPORARY, remove, replace_checkpoint
from headway.checkpoint.format.manifest import FileEntry, Manifest, write_manifest
from headway.checkpoint.format.sealing import SEALED, SealedFile, encryption_key, key_to_encrypt_with, seal
from headway.checkpoint.format.signing import SIGNATURE, key_to_sign_with
from headway.checkpoint.verify import Verification, verify_checkpoint
from headway.core.credentials.keys import key_text
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files.atomic import sync_folder
from headway.core.files.hashes import sha256_file
from headway.core.process.faults import fault_point
from headway.core.process.variables import with_variables

#: Variables of the new keys; with `_FILE`, of the files that hold them.
NEW_ENCRYPTION_KEY = "HEADWAY_NEW_ENCRYPTION_KEY"
NEW_SIGNING_KEY = "HEADWAY_NEW_SIGNING_KEY"
#: Key of a resealed manifest's context: which key its files are encrypted with, without revealing it.
SEALED_WITH = "sealed_with"


@dataclass(frozen=True)
class Keys:
    """Keys as their variables hold them; None for one that is not set."""

    encryption: str | None
    signing: str | None

    @property
    def name(self) -> str | None:
        """Identifies the encryption key without revealing it."""
        with self.in_use():
            key = encryption_key()
        return None if key is None else hashlib.sha256(b"headway key name" + key).hexdigest()[:16]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Read and write checkpoints with these keys in a block; the process must have no other thread that does."""
        given = {sealing.VARIABLE: self.encryption, signing.VARIABLE: self.signing}
        with with_variables({**dict.fromkeys(f"{name}_FILE" for name in given), **given}):
            yield


def old_and_new_keys() -> tuple[Keys, Keys]:
    """Return the keys that checkpoints have, and those that they shall have.

    Raises:
        ConfigError: No new key is set, or one is not usable.
    """
    old = Keys(key_text(sealing.VARIABLE), key_text(signing.VARIABLE))
    given = Keys(key_text(NEW_ENCRYPTION_KEY), key_text(NEW_SIGNING_KEY))
    new = Keys(given.encryption or old.encryption, given.signing or old.signing)
    if new == old or (given.encryption and not old.encryption) or (given.signing and not old.signing):
        raise ConfigError(
            "a change of keys takes the present key and another one",
            where=f"{sealing.VARIABLE} and {NEW_ENCRYPTION_KEY}, {signing.VARIABLE} and {NEW_SIGNING_KEY}",
            fix=f"set {sealing.VARIABLE} to the key that checkpoints have, and {NEW_ENCRYPTION_KEY} to the new one",
        )
    with new.in_use():
        if new.encryption is not None:
            key_to_encrypt_with(NEW_ENCRYPTION_KEY)
        if new.signing is not None:
            key_to_sign_with()
    return old, new


def reseal_folder(folder: Path, old: Keys, new: Keys) -> bool:
    """Give a local checkpoint the new keys, and return whether it had others. The old one stays until the new one is
    in its place.

    Raises:
        CheckpointError: It is damaged, or cannot be opened with either key.
        OSError: It cannot be written.
    """
    with suppress(ConfigError), new.in_use():
        if verify_checkpoint(folder).good:
            return False
    with old.in_use():
        manifest = _good_manifest(verify_checkpoint(folder))
        work = folder.parent / f"{TEMPORARY}reseal"
        remove(work)
        target = work / folder.name
        target.mkdir(parents=True)
        files = {name: reseal_file(folder / name, target, entry, new) for name, entry in manifest.files.items()}
    for path in folder.iterdir():
        if path.is_file() and path.name not in {*files, "manifest.json"}:
            shutil.copy2(path, target / path.name)
    write_manifest(target, resealed(manifest, files, new))
    sync_folder(target)
    fault_point("reseal.files")
    with new.in_use():
        _good_manifest(verify_checkpoint(target))
    replace_checkpoint(folder, target)
    remove(work)
    return True


def reseal_file(path: Path, target: Path, entry: FileEntry, new: Keys) -> FileEntry:
    """Write a file of a checkpoint into another folder, encrypted with the new key if it was encrypted with the key in
    use, and return its entry in the manifest."""
    copy = target / path.name
    if not path.name.endswith(SEALED):
        with suppress(OSError):
            os.link(path, copy)
            return entry
        shutil.copy2(path, copy)
        return entry
    with new.in_use():
        key = key_to_encrypt_with(NEW_ENCRYPTION_KEY)
    with copy.open("wb") as file:
        seal(_Content(path), file, key, path.name.removesuffix(SEALED))
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=copy.stat().st_size, sha256=sha256_file(copy))


def resealed(manifest: Manifest, files: dict[str, FileEntry], new: Keys, **context: str) -> Manifest:
    """Return the manifest of a checkpoint with other files, signed with the new key if it was signed.

    Args:
        manifest: The manifest.
        files: The entries of its files.
        new: The new keys.
        context: What else its context says.
    """
    about = {**manifest.context, **context, **({} if new.name is None else {SEALED_WITH: new.name})}
    found = manifest.model_copy(update={"files": files, "context": about})
    if SIGNATURE not in manifest.context:
        return found
    with new.in_use():
        return found.signed(key_to_sign_with())


class _Content:
    """The content of a sealed file as a stream."""

    def __init__(self, path: Path) -> None:
        self._file = SealedFile(path)
        self._at = 0

    def read(self, count: int, /) -> bytes:
        end = min(self._at + count, self._file.size)
        content = bytes(self._file.read(self._at, end))
        self._at = end
        return content


def _good_manifest(found: Verification) -> Manifest:
    if found.manifest is None or not found.good:
        raise CheckpointError(
            f"its key is not changed, since it does not verify: {'; '.join(map(str, found.damage))}",
            where=found.place,
            fix="restore it from a copy, or remove it; then run the same command again",
        )
    return found.manifest

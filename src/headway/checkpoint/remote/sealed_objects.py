"""Object storage that gets checkpoints only encrypted. Claims and hints hold no training data and stay readable."""

from __future__ import annotations

import fcntl
import hmac
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from headway.checkpoint.format.sealing import (
    SEALED,
    Undecipherable,
    content_size,
    seal,
    seal_bytes,
    sealed_size,
    unseal_bytes,
    unseal_file,
)
from headway.checkpoint.records import RECORDS_FILE
from headway.checkpoint.remote.objects import Objects
from headway.core.errors import CheckpointError, explaining_os_errors
from headway.core.files.foreign import LISTING_BYTES
from headway.core.storage import RECORD_BYTES, ObjectInfo

_WORKING = ".sealing-"
#: Records of a run that are named by the hash of their content.
_NAMED_BY_HASH = re.compile(rf"(.*/)?([0-9a-f]{{64}})(-{re.escape(RECORDS_FILE)})")
#: Notes about the parts of a save (see `relay.py`). They hold what its manifest does.
_ABOUT_PART = re.compile(r"-(part-[0-9]+\.json|failed-[0-9]+\.txt)$")


class SealedObjects(Objects):
    """Objects whose checkpoint files and manifests are sealed when uploaded and opened when downloaded.

    Objects without encryption stay readable, so a run may begin to encrypt at any time. It may also stop: sealed
    objects can then still be read and removed, and new ones are not sealed.
    """

    key: bytes
    seals: bool = True
    """Whether to seal new objects."""

    def stat(self, name: str = "") -> ObjectInfo | None:
        """Return the size of the content, and the version; None if there is no such object."""
        for there in self._names_of(name):
            found = super().stat(there)
            if found is not None and there != name:
                size = content_size(found.bytes)
                return replace(found, bytes=-1 if size is None else size)
            if found is not None:
                return found
        return None

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes | None:
        """Return the decrypted content of a small object; None if there is none."""
        for there in self._names_of(name):
            content = super().read(there, most if there == name else sealed_size(most))
            if content is not None:
                return content if there == name else unseal_bytes(content, self.key, _base(name))
        return None

    def open_one_of(self, names: Iterable[str]) -> bool:
        """Return whether any of these objects is sealed and opens with the key."""
        for name in names:
            content = super().read(name + SEALED, sealed_size(LISTING_BYTES))
            if content is not None:
                with suppress(Undecipherable):
                    unseal_bytes(content, self.key, _base(name))
                    return True
        return False

    def download(self, name: str, path: Path, size: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Download an object, continuing an earlier download, and decrypt it if it is sealed."""
        find = super().stat
        there = next((there for there in self._names_of(name) if find(there) is not None), name)
        if there == name:
            super().download(name, path, size, advance)
            return
        if path.exists() and path.stat().st_size == size:
            advance(size)
            return
        sealed = path.with_name(path.name + SEALED)
        super().download(there, sealed, sealed_size(size), advance)
        try:
            unseal_file(sealed, path, self.key, _base(name))
        finally:
            sealed.unlink()

    def upload(self, name: str, path: Path) -> ObjectInfo:
        """Seal a file into a temporary file next to its folder, and upload that.

        Raises:
            CheckpointError: As for `Objects.upload`; also if there is no room for the sealed file.
        """
        if not self._is_to_be_sealed(name):
            return super().upload(name, path)
        folder = path.parent.parent
        with (
            explaining_os_errors(
                CheckpointError,
                f"{_base(name)} cannot be encrypted for upload",
                folder,
                "make room there, and make it writable",
            ),
            _working_file(folder) as working,
        ):
            with path.open("rb") as source:
                seal(source, working, self.key, _base(name))
            working.flush()
            found = super().upload(self.sealed_name(name), Path(working.name))
        return replace(found, bytes=path.stat().st_size)

    def create(self, name: str, content: bytes) -> bool:
        """Create a small object, sealed if it is secret, unless it exists."""
        if not self._is_to_be_sealed(name):
            return super().create(name, content)
        return super().create(name + SEALED, seal_bytes(content, self.key, _base(name)))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, sealed if it is secret."""
        if self._is_to_be_sealed(name):
            super().write(name + SEALED, seal_bytes(content, self.key, _base(name)))
        else:
            super().write(name, content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, both their sealed and their plain form."""
        for name in names:
            super().remove([name + SEALED, name] if _is_secret(name) else [name])

    def names(self) -> list[str]:
        """Return the names in this folder, without the suffix of sealed objects."""
        return sorted({name.removesuffix(SEALED) for name in super().names()})

    def _is_to_be_sealed(self, name: str) -> bool:
        return self.seals and _is_secret(name)

    def _names_of(self, name: str) -> list[str]:
        """Return the names that an object may have in the store, the likely one first."""
        if not _is_secret(name):
            return [name]
        sealed = list(dict.fromkeys([self.sealed_name(name), name + SEALED]))
        return [*sealed, name] if self.seals else [name, *sealed]

    def sealed_name(self, name: str) -> str:
        """Return the name for a new sealed object.

        With a plain hash of its content in the name, the operator of the store could test guesses about the content.
        Earlier versions did that, so such names are read too.
        """
        if match := _NAMED_BY_HASH.fullmatch(name):
            names_key = hmac.digest(self.key, b"headway object names", "sha256")
            keyed = hmac.digest(names_key, bytes.fromhex(match[2]), "sha256").hex()
            name = f"{match[1] or ''}{keyed}{match[3]}"
        return name + SEALED


def _is_secret(name: str) -> bool:
    base = _base(name)
    if base.endswith((".safetensors", f"-{RECORDS_FILE}")) or _ABOUT_PART.search(base):
        return True
    return base.startswith("manifest.") and not base.endswith(SEALED)


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


@contextmanager
def _working_file(folder: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for sealed content, and remove those that killed processes left.

    Each file is locked while its process lives, so an unlocked one is a leftover; it may be as large as a shard.
    """
    for left in folder.glob(f"{_WORKING}*"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_WORKING) as working:
        with suppress(OSError):  # without locks, another process cannot mistake it for a leftover either
            fcntl.flock(working, fcntl.LOCK_EX)
        yield working

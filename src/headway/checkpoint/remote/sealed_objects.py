"""Object storage that sees checkpoints only encrypted. Claims and hints, which hold nothing of a run, stay readable."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
from headway.checkpoint.remote.objects import RECORD_BYTES, Facts, Objects
from headway.core.errors import CheckpointError, fix_for
from headway.core.foreign import LISTING_BYTES

_WORKING = ".sealing-"


class SealedObjects(Objects):
    """Seals files and manifests of checkpoints on their way out, and opens them on their way back.

    What is there without encryption can still be read, so that a run may begin to encrypt at any time; and may end it:
    then what is sealed there can be read and removed, and nothing more is sealed.
    """

    key: bytes
    seals: bool = True
    """Seal what is sent from now on."""

    def facts(self, name: str) -> Facts | None:
        """Size of the content, and version."""
        for there in self._names_of(name):
            found = super().facts(there)
            if found is not None and there != name:
                size = content_size(found.bytes)
                return Facts(-1 if size is None else size, found.version)
            if found is not None:
                return found
        return None

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes | None:
        """The content."""
        for there in self._names_of(name):
            content = super().read(there, most if there == name else sealed_size(most))
            if content is not None:
                return content if there == name else unseal_bytes(content, self.key, _base(name))
        return None

    def open_one_of(self, names: Iterable[str]) -> bool:
        """Whether any of these objects lies there sealed, and can be opened."""
        for name in names:
            content = super().read(name + SEALED, sealed_size(LISTING_BYTES))
            if content is not None:
                with suppress(Undecipherable):
                    unseal_bytes(content, self.key, _base(name))
                    return True
        return False

    def fetch(self, name: str, path: Path, size: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Download what is sealed, which goes on where it ended, and open it."""
        if not self._lies_sealed(name):
            super().fetch(name, path, size, advance)
            return
        if path.exists() and path.stat().st_size == size:
            advance(size)
            return
        sealed = path.with_name(path.name + SEALED)
        super().fetch(name + SEALED, sealed, sealed_size(size), advance)
        try:
            unseal_file(sealed, path, self.key, _base(name))
        finally:
            sealed.unlink()

    def put(self, name: str, path: Path) -> Facts:
        """Seal a file beside its folder, and upload that.

        Raises:
            CheckpointError: as `Objects.put`; also when there is no room for the sealed file here.
        """
        if not self._is_to_be_sealed(name):
            return super().put(name, path)
        folder = path.parent.parent
        try:
            with _working_file(folder) as working:
                with path.open("rb") as source:
                    seal(source, working, self.key, _base(name))
                working.flush()
                found = super().put(name + SEALED, Path(working.name))
        except OSError as error:
            raise CheckpointError(
                f"{_base(name)} cannot be encrypted to be sent: {error.strerror or error}",
                where=str(folder),
                fix=fix_for(error, "make room there, and make it writable"),
            ) from error
        return Facts(path.stat().st_size, found.version)

    def create(self, name: str, content: bytes) -> bool:
        """Seal and create."""
        if not self._is_to_be_sealed(name):
            return super().create(name, content)
        return super().create(name + SEALED, seal_bytes(content, self.key, _base(name)))

    def write(self, name: str, content: bytes) -> None:
        """Seal and write."""
        if self._is_to_be_sealed(name):
            super().write(name + SEALED, seal_bytes(content, self.key, _base(name)))
        else:
            super().write(name, content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove what is sealed, and what is not."""
        for name in names:
            super().remove([name + SEALED, name] if _is_secret(name) else [name])

    def folders(self) -> list[str]:
        """Names without the ending of sealed ones."""
        return sorted({name.removesuffix(SEALED) for name in super().folders()})

    def _is_to_be_sealed(self, name: str) -> bool:
        return self.seals and _is_secret(name)

    def _lies_sealed(self, name: str) -> bool:
        for there in self._names_of(name):
            if super().facts(there) is not None:
                return there != name
        return False

    def _names_of(self, name: str) -> list[str]:
        """What an object may be called there, the likely name first."""
        if not _is_secret(name):
            return [name]
        return [name + SEALED, name] if self.seals else [name, name + SEALED]


def _is_secret(name: str) -> bool:
    base = _base(name)
    return base.endswith(".safetensors") or (base.startswith("manifest.") and not base.endswith(SEALED))


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


@contextmanager
def _working_file(folder: Path) -> Iterator[IO[bytes]]:
    """A file for what is sealed, locked as long as its process lives: those that nobody holds were left by a kill, and
    each may be as large as what was to be sent."""
    for left in folder.glob(f"{_WORKING}*"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=_WORKING) as working:
        with suppress(OSError):  # where there are no locks, nobody can take it for one that was left either
            fcntl.flock(working, fcntl.LOCK_EX)
        yield working

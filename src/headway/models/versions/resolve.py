"""How a reference such as `my-model@prod` becomes a version, and a version a folder whose every byte is verified."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headway.core.errors import CheckpointError, ConfigError, fix_for
from headway.core.files.hashes import sha256_file
from headway.core.files.paths import user_cache
from headway.core.files.scratch import scratch_folder
from headway.core.format import printable
from headway.models.versions.records import AliasChange, ModelVersion, VersionFile, is_alias, is_model_name
from headway.models.versions.registry import Registry, open_registry

_REFERENCE = re.compile(r"([^@/\s]+)@([^@/\s]+)")


@dataclass(frozen=True)
class Reference:
    """What names a version: a model with a number or an alias; without both, its newest version."""

    name: str
    number: int | None = None
    alias: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse `name`, `name@3` or `name@alias`.

        Raises:
            ConfigError: It has another form.
        """
        name, at, rest = text.partition("@")
        if is_model_name(name):
            if not at:
                return cls(name)
            if rest.isascii() and rest.isdecimal() and 0 < int(rest) < 10**8:
                return cls(name, number=int(rest))
            if is_alias(rest):
                return cls(name, alias=rest)
        raise ConfigError(
            f"'{text}' names no version of a model",
            where="the reference",
            fix="my-model@3, my-model@prod, or my-model for the newest version",
        )

    def __str__(self) -> str:
        rest = self.alias or self.number
        return self.name if rest is None else f"{self.name}@{rest}"


@dataclass(frozen=True)
class ResolvedVersion:
    """What a reference names now."""

    registry: Registry
    version: ModelVersion
    change: AliasChange | None = None
    """The change of the alias that names it; None if the reference has no alias."""

    @property
    def number(self) -> int:
        """The version's number."""
        return self.version.number

    @property
    def manifest_hash(self) -> str:
        """What identifies the version: if it is equal, so is every byte."""
        return self.version.sha256

    @property
    def url(self) -> str:
        """The folder of its files: a path on this machine, or a URL."""
        place = self.registry.files_of(self.version)
        return place.url.partition("://")[2] if place.local else place.url


def is_reference(text: str) -> bool:
    """Return whether a text has the form `name@alias` or `name@3`, and is no path that exists."""
    return _REFERENCE.fullmatch(text) is not None and not Path(text).exists()


def resolve(reference: str | Reference, registry: Registry | str | Path | None = None) -> ResolvedVersion:
    """Return the version that a reference names now.

    To watch an alias, call it again and compare `manifest_hash`: it costs one listing and two small reads.

    Args:
        reference: `name@alias`, `name@3`, or `name` for the newest version.
        registry: The registry, or its place; that of `HEADWAY_REGISTRY` or `registry` here if None.

    Raises:
        ConfigError: There is no such version or alias.
        CheckpointError: A record was changed, or the registry cannot be reached.
    """
    registry = registry if isinstance(registry, Registry) else open_registry(registry)
    wanted = reference if isinstance(reference, Reference) else Reference.parse(reference)
    if wanted.number is not None:
        return ResolvedVersion(registry, registry.required(wanted.name, wanted.number))
    if wanted.alias is None:
        found = registry.newest(wanted.name)
        if found is None:
            raise registry.unknown(wanted.name, "version", ())
        return ResolvedVersion(registry, found)
    change = registry.present(wanted.name, wanted.alias)
    if change is None or change.number is None:
        known = [f"@{alias}" for alias in registry.aliases(wanted.name)]
        raise registry.unknown(wanted.name, f"alias '{wanted.alias}'", known)
    version = registry.required(wanted.name, change.number)
    if version.sha256 != change.version_sha256:
        raise CheckpointError(
            f"{version} is not the version that {wanted} was set to: its manifest was replaced",
            where=registry.url,
            fix=f"headway registry verify {wanted.name} --registry {registry.url}",
        )
    return ResolvedVersion(registry, version, change)


def local_folder(
    found: ResolvedVersion, cache: Path | None = None, advance: Callable[[int], None] = lambda _: None
) -> Path:
    """Return a folder on this machine with the files of a version, every byte verified.

    The files of a registry on this machine are verified where they are; those of an object store are fetched into a
    cache, once, and verified each time.

    Args:
        found: The version.
        cache: Folder of the cache; this user's if None.
        advance: Called with the number of bytes that have arrived.

    Raises:
        CheckpointError: A file is missing or was changed, or the store cannot be reached.
    """
    version = found.version
    if found.registry.objects.local:
        return _verified_in_place(found)
    cache = cache or user_cache() / "models"
    folder = cache / version.fingerprint
    if folder.is_dir() and not list(problems_of(version, folder)):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".fetching-", cache) as scratch:
            fetch(found, scratch, advance)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(FileExistsError, NotADirectoryError):
                scratch.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"{version} cannot be fetched: {error.strerror or error}",
            where=str(error.filename or cache),
            fix=fix_for(error, "free space there, or set XDG_CACHE_HOME to another folder"),
        ) from error
    # Another process may have been faster, or something else may lie there.
    _check(version, folder, f"remove {folder}, and run the same command again")
    return folder


def fetch(found: ResolvedVersion, folder: Path, advance: Callable[[int], None] = lambda _: None) -> None:
    """Download the files of a version into an empty folder, and verify them.

    Raises:
        CheckpointError: One is missing or was changed.
        OSError: The folder cannot be written.
    """
    if found.registry.objects.local:
        _verified_in_place(found)
    place = found.registry.files_of(found.version)
    for name, file in sorted(found.version.files.items()):
        there = place.stat(name)
        if there is not None and there.bytes == file.bytes:
            place.download(name, folder / name, file.bytes, advance)
    _check(found.version, folder, _verify_words(found))


def _verified_in_place(found: ResolvedVersion) -> Path:
    folder = Path(found.url)
    _check(found.version, folder, _verify_words(found))
    return folder


def _verify_words(found: ResolvedVersion) -> str:
    return f"headway registry verify {found.version} --registry {found.registry.url}"


def problems_of(version: ModelVersion, folder: Path) -> Iterator[str]:
    """Yield what is wrong with a folder of a version's files.

    A file that does not belong there counts, since it could change what a library loads; hidden ones do not, which
    killed writers leave.
    """
    try:
        names = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        yield f"its files cannot be read: {error.strerror}"
        return
    for name in sorted(name for name in names - version.files.keys() if not name.startswith(".")):
        yield f"{printable(name)} does not belong to it"
    for name, file in sorted(version.files.items()):
        if why := _file_problem(folder / name, file):
            yield f"{name} {why}"


def _file_problem(path: Path, file: VersionFile) -> str | None:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_size != file.bytes:
            return f"has {found.st_size:,} bytes instead of {file.bytes:,}"
        return None if sha256_file(path) == file.sha256 else "has other content than was registered"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _check(version: ModelVersion, folder: Path, fix: str) -> None:
    problems = list(problems_of(version, folder))
    if problems:
        raise CheckpointError(f"{version} is damaged: {'; '.join(problems)}", where=str(folder), fix=fix)

"""A registry: a folder or an object store with the versions of models, through the one storage client."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.files.foreign import read_bytes
from headway.core.storage import Problem, Storage, credentials_fix, highest, scheme_of
from headway.models.versions.records import (
    MANIFEST_BYTES,
    AliasChange,
    BrokenRecord,
    ModelVersion,
    is_alias,
    is_model_name,
    number_of,
    record_name,
)

#: The environment variable with the registry, where a command names none.
VARIABLE = "HEADWAY_REGISTRY"
DEFAULT = "registry"
VERSIONS = "versions"
FILES = "files"
ALIASES = "aliases"
#: The object by which a store shows whether it replaces objects in a conditional put.
_PROBE = ".conditional-put"

T = TypeVar("T")


class RegistryObjects(Storage):
    """The objects of a registry, with errors in its words."""

    purpose = "a model registry at"

    def explain(self, problem: Problem, url: str, reason: str) -> HeadwayError:
        """Return the error for a problem with an object."""
        match problem:
            case "credentials":
                return ConfigError(f"the registry denies access: {reason}", where=url, fix=credentials_fix(url))
            case "unreachable" | "incomplete" | "stopped":
                fix = "check the network and --option endpoint_url=...; then run the same command again"
                return CheckpointError(f"the registry cannot be reached: {reason}", where=url, fix=fix)
            case "missing":
                fix = f"make it, or correct --registry or {VARIABLE}"
                return ConfigError(f"there is no such bucket or folder: {reason}", where=url, fix=fix)
            case "large":
                fix = "Headway has not written it: remove it, and run headway registry verify"
                return CheckpointError(reason, where=url, fix=fix)
            case _:
                fix = f"check --registry or {VARIABLE}"
                return CheckpointError(f"the registry cannot be used: {reason}", where=url, fix=fix)


def open_registry(
    place: str | Path | None = None, options: Mapping[str, Any] | None = None, patience_seconds: float = 60.0
) -> Registry:
    """Open a registry, which begins to exist with its first version.

    Args:
        place: A folder or a URL; that of `HEADWAY_REGISTRY` if None, or else `registry` here.
        options: Options for `fsspec`.
        patience_seconds: How long to retry while a store does not answer.

    Raises:
        ConfigError: The URL cannot be used.
    """
    named = str(place or os.environ.get(VARIABLE) or DEFAULT)
    url = named if scheme_of(named) else f"file://{Path(named).expanduser().absolute()}"
    return Registry(RegistryObjects(url, options, patience_seconds))


class Registry:
    """Reads and writes the records of a registry. A broken record is an error, never a missing one.

    Args:
        objects: Its root.
    """

    def __init__(self, objects: RegistryObjects) -> None:
        self.objects = objects

    @property
    def url(self) -> str:
        """Where it is, as a command names it: a path for a folder on this machine."""
        return str(self.folder()) if self.objects.local else self.objects.url

    def folder(self, *names: str) -> Path:
        """Return the path of something in a registry that is a folder on this machine."""
        return Path(self.objects.url.partition("://")[2], *names)

    # Reading

    def models(self) -> list[str]:
        """Return the names of all models; a file at the root, or what is not named like one, is no model."""
        names = [name for name in self.objects.names() if is_model_name(name)]
        return [name for name in names if not self.objects.local or self.folder(name).is_dir()]

    def check_model(self, name: str) -> None:
        """Check that a name may be that of a model.

        Raises:
            ConfigError: It may not.
        """
        if not is_model_name(name):
            raise ConfigError(
                f"'{name}' is no name for a model: letters, digits, '.', '_' and '-', at most 96 in all",
                where=self.url,
                fix="for example my-model",
            )

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of all versions of a model, rising; none for an unknown model."""
        return self._numbers(f"{name}/{VERSIONS}")

    def aliases(self, name: str) -> list[str]:
        """Return all aliases that a model has or had."""
        return [alias for alias in self.objects.at(f"{name}/{ALIASES}").names() if is_alias(alias)]

    def changes(self, name: str, alias: str) -> list[int]:
        """Return the numbers of all changes of an alias, rising."""
        return self._numbers(f"{name}/{ALIASES}/{alias}")

    def version(self, name: str, number: int) -> ModelVersion | None:
        """Return the manifest of a version; None if there is none.

        Raises:
            CheckpointError: It was changed, or belongs to another place.
        """
        path = f"{name}/{VERSIONS}/{record_name(number)}"
        found = self._read(path, ModelVersion.parse)
        if found is not None and (found.name, found.number) != (name, number):
            raise self._broken(path, f"is the manifest of {found}")
        return found

    def change(self, name: str, alias: str, change: int) -> AliasChange | None:
        """Return one change of an alias; None if there is none.

        Raises:
            CheckpointError: It was changed, or belongs to another place.
        """
        path = f"{name}/{ALIASES}/{alias}/{record_name(change)}"
        found = self._read(path, AliasChange.parse)
        if found is not None and (found.name, found.alias, found.change) != (name, alias, change):
            raise self._broken(path, f"is a change of {found.name}@{found.alias}")
        return found

    def newest(self, name: str) -> ModelVersion | None:
        """Return the version with the highest number; None if there is none."""
        numbers = self.numbers(name)
        return self.version(name, numbers[-1]) if numbers else None

    def present(self, name: str, alias: str) -> AliasChange | None:
        """Return the change of an alias that holds now; None if it was never set."""
        changes = self.changes(name, alias)
        return self.change(name, alias, changes[-1]) if changes else None

    def required(self, name: str, number: int) -> ModelVersion:
        """Return the manifest of a version that must exist.

        Raises:
            ConfigError: It does not exist.
            CheckpointError: It was changed.
        """
        found = self.version(name, number)
        if found is None:
            known = ", ".join(map(str, self.numbers(name)))
            raise ConfigError(f"{name} has no version {number}", where=self.url, fix=self._known(name, known))
        return found

    def _known(self, name: str, known: str) -> str:
        if known:
            return f"it has {known}: headway registry list {name} --registry {self.url}"
        near = difflib.get_close_matches(name, self.models(), n=1)
        return f"did you mean {near[0]}?" if near else f"headway registry list --registry {self.url} shows all models"

    def unknown(self, name: str, what: str, known: Iterable[str]) -> ConfigError:
        """Return the error for something that a model does not have."""
        return ConfigError(f"{name} has no {what}", where=self.url, fix=self._known(name, ", ".join(known)))

    def _read(self, path: str, parse: Callable[[bytes], T]) -> T | None:
        try:
            content = self._content(path)
            return None if content is None else parse(content)
        except BrokenRecord as error:
            raise self._broken(path, str(error)) from None

    def _content(self, path: str) -> bytes | None:
        if not self.objects.local:
            return self.objects.read(path, MANIFEST_BYTES)
        # Whoever may write into the folder could put a FIFO there, which a reader would wait for.
        try:
            return read_bytes(self.folder(path), MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BrokenRecord(f"cannot be read: {error.strerror or error}") from None

    def _broken(self, path: str, why: str) -> CheckpointError:
        fix = "restore it from a copy; headway registry verify shows what else was changed"
        return CheckpointError(f"the record {why}", where=self.objects.url_of(path), fix=fix)

    def _numbers(self, folder: str) -> list[int]:
        place = self.objects.at(folder)
        listed = sorted(number for name in place.names() if (number := number_of(name)) is not None)
        last = listed[-1] if listed else 0
        # Listings may lag behind what was written; reading a name does not.
        more = highest(lambda number: place.stat(record_name(last + number)) is not None)
        return [*listed, *range(last + 1, last + more + 1)]

    # Writing

    def check_conditional_put(self, name: str) -> None:
        """Check that the store does not replace an object in a conditional put.

        Args:
            name: The model in whose folder that is tried, with an object that stays.

        Raises:
            ConfigError: It does: two writers would get one number.
        """
        place = self.objects.at(name)
        if place.local:
            return
        place.create(_PROBE, b"{}")
        if place.create(_PROBE, b"[]"):
            raise ConfigError(
                "the store replaces objects in conditional puts (If-None-Match): two writers could take one number",
                where=self.url,
                fix="choose a store with conditional puts, or a folder that the machines mount",
            )

    def put_version(self, version: ModelVersion) -> bool:
        """Make the manifest of a version, whose files are there, and return whether it is new.

        Returns:
            False if another writer has taken its number.
        """
        return self.objects.create(f"{version.name}/{VERSIONS}/{record_name(version.number)}", version.render())

    def put_change(self, change: AliasChange) -> bool:
        """Change an alias, and return whether no other writer was faster."""
        path = f"{change.name}/{ALIASES}/{change.alias}/{record_name(change.change)}"
        return self.objects.create(path, change.render())

    def files_of(self, version: ModelVersion) -> RegistryObjects:
        """Return the folder of a version's files."""
        return self.files_at(version.name, version.fingerprint)

    def files_at(self, name: str, fingerprint: str) -> RegistryObjects:
        """Return the folder of the files with a fingerprint."""
        return self.objects.at(f"{name}/{FILES}/{fingerprint}")

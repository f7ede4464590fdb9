"""The records of a registry: a version's manifest and the change of an alias, each with the hash of its own content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from headway.core.files.foreign import parse_json
from headway.core.files.hashes import fingerprint
from headway.core.format import printable

#: Largest manifest of a version; real ones have some 20 KB.
MANIFEST_BYTES = 16 * 2**20
#: Most files of a version.
MOST_FILES = 10_000
FORMAT = 1
#: The file of a version with its signature by OpenSSF's model-signing.
SIGNATURE = "model.sig"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +-]{0,254}")
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"([0-9]{8})\.json")

T = TypeVar("T")


class BrokenRecord(ValueError):
    """A record that was changed after it was written, or that Headway has not written."""


def is_model_name(text: str) -> bool:
    """Return whether a text may name a model."""
    return _NAME.fullmatch(text) is not None


def is_alias(text: str) -> bool:
    """Return whether a text may name an alias: it begins with a letter, so that it is no version's number."""
    return _ALIAS.fullmatch(text) is not None


def is_file_name(text: str) -> bool:
    """Return whether a version may have a file of this name, which is never a path and never hidden."""
    return _FILE.fullmatch(text) is not None


def record_name(number: int) -> str:
    """Return the name of a numbered record."""
    return f"{number:08d}.json"


def number_of(name: str) -> int | None:
    """Return the number of a record by its name; None for another object."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match and int(match[1]) else None


@dataclass(frozen=True)
class VersionFile:
    """One file of a version."""

    bytes: int
    sha256: str


def files_fingerprint(files: Mapping[str, VersionFile]) -> str:
    """Return the hash of names and contents, which names the folder of these files."""
    return fingerprint({name: [file.bytes, file.sha256] for name, file in files.items()})


@dataclass(frozen=True)
class _Record:
    """A record with the hash of its own content."""

    @property
    def sha256(self) -> str:
        """The hash of the record, which identifies it."""
        return fingerprint(self._content())

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def render(self) -> bytes:
        """Return the content of its object."""
        content = self._content()
        sealed = {**content, "sha256": fingerprint(content)}
        return json.dumps(sealed, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


@dataclass(frozen=True)
class ModelVersion(_Record):
    """The manifest of a version: everything that is known of it."""

    name: str
    number: int
    time: float
    """Unix seconds."""
    by: str
    """Who has registered it, and on which machine."""
    files: Mapping[str, VersionFile]
    source: Mapping[str, Any]
    """Where it comes from: `kind` (run, folder or hub), and what identifies it there."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What is known of its making: `ledger`, `config`, `data`, `metrics`, `benchmarks`, `card`; unknown is absent."""
    parent: str | None = None
    """The version or the model that it continues."""
    licence: str | None = None
    """Its identifier of SPDX."""
    previous: str | None = None
    """The hash of the manifest before it: manifests are a chain, in which a removed or replaced one shows."""

    @property
    def fingerprint(self) -> str:
        """The hash of its files."""
        return files_fingerprint(self.files)

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def is_signed(self) -> bool:
        """Whether it has a signature, which `verify --key` checks."""
        return SIGNATURE in self.files

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    @classmethod
    def parse(cls, content: bytes) -> ModelVersion:
        """Parse and check a manifest.

        Raises:
            BrokenRecord: It was changed, or is none.
        """
        found = _parse(content)
        files = found.get("files")
        if not isinstance(files, dict) or len(files) > MOST_FILES:
            raise BrokenRecord("has no list of files")
        entries = {name: _file(name, entry) for name, entry in files.items()}
        version = _made(cls, {**found, "files": entries})
        is_sound = (
            isinstance(version.name, str)
            and is_model_name(version.name)
            and _is_number(version.number)
            and isinstance(version.time, int | float)
            and isinstance(version.by, str)
            and isinstance(version.source, dict)
            and isinstance(version.evidence, dict)
            and isinstance(version.parent, str | None)
            and isinstance(version.licence, str | None)
            and isinstance(version.previous, str | None)
        )
        if not is_sound:
            raise BrokenRecord("has a field of another type")
        return version


@dataclass(frozen=True)
class AliasChange(_Record):
    """One change of an alias: which version it names since."""

    name: str
    alias: str
    change: int
    """Counted from 1."""
    number: int | None
    """The version; None if the alias was removed."""
    version_sha256: str | None
    """The hash of that version's manifest."""
    time: float
    by: str
    checks: Mapping[str, Any] = field(default_factory=dict)
    """What was checked before, with its results."""
    forced: str | None = None
    """The reason for which it was set although a check failed."""
    previous: str | None = None
    """The hash of the change before it."""

    @classmethod
    def parse(cls, content: bytes) -> AliasChange:
        """Parse and check the change of an alias.

        Raises:
            BrokenRecord: It was changed, or is none.
        """
        change = _made(cls, _parse(content))
        is_sound = (
            isinstance(change.alias, str)
            and is_alias(change.alias)
            and _is_number(change.change)
            and (change.number is None or _is_number(change.number))
            and isinstance(change.version_sha256, str | None)
            and isinstance(change.time, int | float)
            and isinstance(change.by, str)
            and isinstance(change.checks, dict)
            and isinstance(change.forced, str | None)
            and isinstance(change.previous, str | None)
        )
        if not is_sound:
            raise BrokenRecord("has a field of another type")
        return change


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value < 10**8


def _parse(content: bytes) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise BrokenRecord(str(error)) from None
    if not isinstance(found, dict):
        raise BrokenRecord("is not a JSON object")
    said = found.pop("sha256", None)
    if said != fingerprint(found):
        raise BrokenRecord("does not have the hash that it states: it was changed")
    if found.pop("format", None) != FORMAT:
        raise BrokenRecord(f"is not of format {FORMAT}: another version of Headway has written it")
    return found


def _made(kind: type[T], fields: Mapping[str, Any]) -> T:
    try:
        return kind(**fields)
    except TypeError:
        raise BrokenRecord("has missing or unknown fields") from None


def _file(name: str, entry: Any) -> VersionFile:
    if isinstance(entry, dict) and is_file_name(name):
        size = entry.get("bytes")
        sha256 = entry.get("sha256")
        if type(size) is int and size >= 0 and isinstance(sha256, str) and _HASH.fullmatch(sha256):
            return VersionFile(size, sha256)
    raise BrokenRecord(f"names a file that cannot be: {printable(name):.80}")

"""Verification of a registry: every record, every file, and what belongs to neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headway.core.audit import AUDIT_FILE
from headway.core.errors import HeadwayError
from headway.core.format import printable
from headway.models.versions import AliasChange, ModelVersion, Registry
from headway.models.versions.records import number_of
from headway.models.versions.registry import ALIASES, FILES, VERSIONS
from headway.models.versions.resolve import problems_of
from headway.registry.who import audit_problems

_LEFT = "no version has these files: a registration was killed, or is under way; the same command completes it"


@dataclass(frozen=True)
class Finding:
    """One thing that a verification has found."""

    kind: Literal["damage", "leftover"]
    """Damage: a record or a file is not as it was registered. Leftover: files that no version has."""
    where: str
    """The version, the alias or the object."""
    what: str


def verify_model(registry: Registry, name: str, numbers: set[int] | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a model's versions and aliases.

    Args:
        registry: The registry.
        name: Of the model.
        numbers: Versions to verify; all, with aliases and leftovers, if None.
    """
    known: dict[int, ModelVersion] = {}
    for number in _all_numbers(registry.numbers(name)):
        if numbers is not None and number not in numbers:
            continue
        try:
            version = registry.version(name, number)
        except HeadwayError as error:
            yield Finding("damage", f"{name}@{number}", error.what)
            continue
        if version is None:
            yield Finding("damage", f"{name}@{number}", "its manifest is gone")
            continue
        known[number] = version
        for what in version_problems(registry, version):
            yield Finding("damage", str(version), what)
    if numbers is not None:
        return
    for number, version in known.items():
        before = known.get(number - 1)
        if before is not None and version.previous != before.sha256:
            yield Finding("damage", str(before), "its manifest is not the one that the next version followed")
    aliases = registry.aliases(name)
    for alias in aliases:
        yield from _alias_findings(registry, name, alias, known)
    for what in audit_problems(registry, name):
        yield Finding("damage", f"{name}/{AUDIT_FILE}", what)
    yield from _strays(registry, name, aliases, {version.fingerprint for version in known.values()})


def version_problems(registry: Registry, version: ModelVersion) -> Iterator[str]:
    """Yield what is wrong with the files of a version; those of an object store are read without being kept."""
    place = registry.files_of(version)
    if place.local:
        yield from problems_of(version, registry.folder(version.name, FILES, version.fingerprint))
        return
    for name in place.names():
        if name not in version.files and not name.startswith("."):
            yield f"{printable(name)} does not belong to it"
    for name, file in sorted(version.files.items()):
        found = place.stat(name)
        if found is None:
            yield f"{name} is missing"
        elif found.bytes != file.bytes:
            yield f"{name} has {found.bytes:,} bytes instead of {file.bytes:,}"
        elif place.stream_to(name, file.bytes, lambda data: None) != file.sha256:
            yield f"{name} has other content than was registered"


def _all_numbers(numbers: list[int]) -> range:
    """Return all numbers up to the highest, since none is ever left out."""
    return range(1, max(numbers, default=0) + 1)


def _alias_findings(registry: Registry, name: str, alias: str, versions: dict[int, ModelVersion]) -> Iterator[Finding]:
    before: AliasChange | None = None
    for change in _all_numbers(registry.changes(name, alias)):
        where = f"{name}@{alias}, change {change}"
        try:
            found = registry.change(name, alias, change)
        except HeadwayError as error:
            yield Finding("damage", where, error.what)
            before = None
            continue
        if found is None:
            yield Finding("damage", where, "its record is gone")
            before = None
            continue
        if before is not None and found.previous != before.sha256:
            yield Finding("damage", where, "does not follow the change before it: one of them was replaced")
        version = versions.get(found.number or 0)
        if found.number is not None and (version is None or version.sha256 != found.version_sha256):
            yield Finding("damage", where, f"names version {found.number}, which is not the one that it was set to")
        before = found


def _strays(registry: Registry, name: str, aliases: list[str], fingerprints: set[str]) -> Iterator[Finding]:
    """Yield folders and objects that no record names."""
    for folder in registry.objects.at(f"{name}/{FILES}").names():
        if folder not in fingerprints:
            yield Finding("leftover", f"{name}/{FILES}/{printable(folder)}", _LEFT)
    records = [VERSIONS, *(f"{ALIASES}/{alias}" for alias in aliases)]
    for folder in records:
        for entry in registry.objects.at(f"{name}/{folder}").names():
            if number_of(entry) is None and not entry.startswith("."):
                yield Finding("damage", f"{name}/{folder}/{printable(entry)}", "is no record")

"""The bill of materials of a wheel: what it installs, in which version and under which licence (CycloneDX 1.6).

Versions are those of this environment, which is the one that was tested. Equal wheels in equal environments give equal
bytes: the serial number follows from the wheel's hash, and the time is that of SOURCE_DATE_EPOCH or left out.
"""

from __future__ import annotations

import os
import re
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files.hashes import sha256_file
from headway.core.version import __version__

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
_MOST_BYTES = 16 * 2**20
_OSI = "License :: OSI Approved :: "
#: Signs of SPDX expressions; old packages put whole texts into their field.
_EXPRESSION = re.compile(r"[A-Za-z0-9.+() -]+")


@dataclass(frozen=True)
class Package:
    """An installed package."""

    name: str
    version: str
    licence: str | None
    """An SPDX expression if the package gives one, else its own word; None if it says nothing."""
    requires: tuple[str, ...]
    """Normal names of what it needs here."""

    @property
    def purl(self) -> str:
        """Its address among all packages (package URL)."""
        return f"pkg:pypi/{self.name}@{self.version}"


def normal_name(name: str) -> str:
    """Return the normal form of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(about: Message) -> str | None:
    """Return the licence that a package's metadata names."""
    if expression := about.get("License-Expression"):
        return str(expression)
    classifiers = [
        str(line).removeprefix(_OSI) for line in about.get_all("Classifier", []) if str(line).startswith(_OSI)
    ]
    if classifiers:
        return "; ".join(classifiers)
    text = str(about.get("License") or "").strip()
    return text.splitlines()[0][:80] if text else None


def needed(requirements: Sequence[str], extras: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """Return normal name and extras of each requirement that holds on this machine.

    Args:
        requirements: As a package's metadata has them (PEP 508).
        extras: Those that are wanted of the package itself.

    Raises:
        ConfigError: the library that reads them is missing.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        raise ConfigError(
            "a bill of materials needs the package packaging", where="this Python", fix="pip install packaging"
        ) from None
    found = []
    for text in requirements:
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found.append((normal_name(one.name), tuple(sorted(one.extras))))
    return found


def installed_closure(requirements: Sequence[str], extras: Sequence[str] = ()) -> list[Package]:
    """Return the installed packages that requirements lead to, sorted by name.

    Raises:
        ConfigError: one is not installed, so its version would be a guess.
    """
    waiting = needed(requirements, extras)
    seen = set[tuple[str, tuple[str, ...]]]()
    packages: dict[str, Package] = {}
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        name, wanted = entry
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"{name} is not installed here, so its version is unknown",
                where="this Python",
                fix=f"pip install {name}",
            ) from None
        more = needed(found.requires or [], wanted)
        waiting += more
        before = packages[name].requires if name in packages else ()
        requires = tuple(sorted({*before, *(one for one, _ in more)} - {name}))
        packages[name] = Package(name, found.version, licence_of(_header(found.read_text("METADATA") or "")), requires)
    return [packages[name] for name in sorted(packages)]


def wheel_sbom(wheel: Path, extras: Sequence[str] = ()) -> dict[str, Any]:
    """Return the bill of materials of a wheel in CycloneDX 1.6.

    Args:
        wheel: The file.
        extras: Extras of it that count.

    Raises:
        ConfigError: it is no wheel, or something that it needs is not installed here.
    """
    about = _wheel_metadata(wheel)
    name = normal_name(str(about["Name"]))
    version = str(about["Version"])
    requirements = [str(line) for line in about.get_all("Requires-Dist", [])]
    packages = [one for one in installed_closure(requirements, extras) if one.name != name]
    digest = sha256_file(wheel)
    direct = tuple(sorted({one for one, _ in needed(requirements, extras)} - {name}))
    itself = Package(name, version, licence_of(about), direct)
    stated = {"component": {**_component(itself), "hashes": [{"alg": "SHA-256", "content": digest}]}}
    tool = {"type": "application", "name": "headway", "version": __version__}
    refs = {one.name: one.purl for one in [itself, *packages]}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{itself.purl}#{digest}')}",
        "version": 1,
        "metadata": {**_moment(), "tools": {"components": [tool]}, **stated},
        "components": [_component(one) for one in packages],
        "dependencies": [
            {"ref": one.purl, "dependsOn": [refs[need] for need in one.requires if need in refs]}
            for one in [itself, *packages]
        ],
    }


def _component(package: Package) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }
    if package.licence is not None:
        is_expression = _EXPRESSION.fullmatch(package.licence) and re.search(" (AND|OR|WITH) ", package.licence)
        entry = {"expression": package.licence} if is_expression else {"license": {"name": package.licence}}
        found["licenses"] = [entry]
    return found


def _moment() -> dict[str, str]:
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch.isdecimal():
        return {}
    return {"timestamp": datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def _wheel_metadata(wheel: Path) -> Message:
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [one for one in archive.namelist() if _METADATA.fullmatch(one)]
            if archive.getinfo(name).file_size > _MOST_BYTES:
                raise ValueError("its metadata is too long")
            about = _header(archive.read(name).decode())
        if not about["Name"] or not about["Version"]:
            raise ValueError("its metadata has no name or no version")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"this is no wheel: {error}", where=str(wheel), fix="make build, then dist/*.whl") from None
    return about


def _header(text: str) -> Message:
    return HeaderParser().parsestr(text)

"""Registration of a version: its files first, and then its manifest, by which it begins to exist.

Files go into a folder that is named by their content, so a killed command is completed by the same command, and two
writers never put different files into one. The manifest is made by a conditional put under the next free number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.credentials.secrets import redact_values
from headway.core.errors import ConfigError
from headway.core.files.hashes import sha256_file
from headway.core.process.faults import fault_point
from headway.core.storage import RECORD_BYTES
from headway.models.versions import ModelVersion, Registry, VersionFile
from headway.models.versions.records import MANIFEST_BYTES, files_fingerprint
from headway.registry.who import who

if TYPE_CHECKING:
    from headway.registry.sources import Gathered


def register(
    registry: Registry,
    name: str,
    found: Gathered,
    files: Mapping[str, Path],
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[ModelVersion, bool]:
    """Register a version with the next free number.

    Args:
        registry: The registry.
        name: Of the model.
        found: What is known of it.
        files: Its files by name (`files_to_register`).
        advance: Called with the number of bytes that have been sent.

    Returns:
        The version, and whether it is new: the same model from the same source is registered only once.

    Raises:
        ConfigError: The store cannot prevent two writers from taking one number, or a file changes meanwhile.
        CheckpointError: The registry cannot be reached, or a record of it is broken.
    """
    registry.check_model(name)
    stamps = {file: _stamp(path) for file, path in files.items()}
    entries = {file: VersionFile(path.stat().st_size, sha256_file(path)) for file, path in sorted(files.items())}
    evidence = redact_values(dict(found.evidence))
    draft = ModelVersion(
        name, 1, time.time(), who(), entries, dict(found.source), evidence, found.parent, found.licence
    )
    _check_size(draft)
    known = _registered(registry, draft)
    if known is not None:
        return known, False
    registry.check_conditional_put(name)
    place = registry.files_at(name, files_fingerprint(entries))
    for file, path in sorted(files.items()):
        place.upload(file, path)
        advance(entries[file].bytes)
        fault_point("registry.file")
    for file, path in files.items():
        if _stamp(path) != stamps[file]:
            fix = "run the same command again when nothing writes there"
            raise ConfigError("the file changed while it was registered", where=str(path), fix=fix)
    fault_point("registry.version")
    return _numbered(registry, draft), True


def _numbered(registry: Registry, draft: ModelVersion) -> ModelVersion:
    """Make the manifest under the first free number."""
    newest = registry.newest(draft.name)
    while True:
        number = 1 if newest is None else newest.number + 1
        version = replace(draft, number=number, previous=None if newest is None else newest.sha256)
        if registry.put_version(version):
            return version
        newest = registry.required(draft.name, number)  # of a faster writer


def _registered(registry: Registry, draft: ModelVersion) -> ModelVersion | None:
    """Return the newest version if it has the same files, source and evidence."""
    newest = registry.newest(draft.name)
    if newest is None:
        return None
    same = replace(draft, number=newest.number, time=newest.time, by=newest.by, previous=newest.previous)
    return newest if same.sha256 == newest.sha256 else None


def _check_size(draft: ModelVersion) -> None:
    size = len(draft.render())
    if size > MANIFEST_BYTES - RECORD_BYTES:
        raise ConfigError(
            f"what is known of the model takes {size:,} bytes, and a manifest has at most {MANIFEST_BYTES:,}",
            where="config, benchmarks",
            fix="give fewer results of benchmarks",
        )


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino

"""Records of a run that travel with its remote checkpoints: ledger, metrics, attempts and the cursors of trackers.

Tensors alone continue a run. Its proof of rows, its curves, what it has spent and what trackers have got are in other
files of the run directory. Every checkpoint of a run with a remote tier takes them along in one archive, whose hash is
in the manifest, so that a signature covers it. A run that starts on another disk continues them from there.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError
from headway.core.files import atomic_write, sha256_file

#: Key of a manifest's context: size and hash of the archive, and when it was made.
RECORDS = "records"
#: The archive, in the folder of the checkpoint.
RECORDS_FILE = "records.zip"
#: What travels. The lines that trackers have got are read first: they are never more than the metrics that follow.
_PATTERNS = ("tracking/*.json", "attempts/*/attempt.json", "ledger.jsonl", "hashes.jsonl", "metrics.jsonl")
_NAMES = re.compile(
    r"tracking/[A-Za-z0-9][A-Za-z0-9._-]*\.json|attempts/[0-9]{3,9}/attempt\.json|(ledger|hashes|metrics)\.jsonl"
)
#: Most bytes of all files. Metrics take about 0.5 KB a step.
_MOST_BYTES = 64 * 2**30
_BLOCK_BYTES = 2**20
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def pack_records(run: Path, folder: Path) -> dict[str, Any]:
    """Write a run's records into the folder of a checkpoint, and return their entry in the manifest's context.

    Raises:
        OSError: The archive cannot be written.
    """
    path = folder / RECORDS_FILE
    try:
        with path.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
                for name in record_names(run):
                    archive.write(run / name, name)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return {"sha256": sha256_file(path), "bytes": path.stat().st_size, "time": time.time()}


def record_names(run: Path) -> Iterator[str]:
    """Yield the names of the records that a run directory has, in the order in which they are packed."""
    for pattern in _PATTERNS:
        for path in sorted(run.glob(pattern)):
            name = path.relative_to(run).as_posix()
            if _NAMES.fullmatch(name) and path.is_file() and not path.is_symlink():
                yield name


def unpack_records(path: Path, entry: Mapping[str, Any], run: Path) -> list[str]:
    """Write the records of an archive into a run directory, over what is there, and return their names.

    Args:
        path: The archive.
        entry: Its entry in the manifest's context.
        run: The run directory.

    Raises:
        CheckpointError: It is not the archive that the manifest names, or holds something else than records.
        OSError: The records cannot be written.
    """
    if path.stat().st_size != entry.get("bytes") or sha256_file(path) != entry.get("sha256"):
        raise _damaged(path, "differ from what was saved")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            strange = [member.filename for member in members if not _NAMES.fullmatch(member.filename)]
            if strange or sum(member.file_size for member in members) > _MOST_BYTES:
                raise _damaged(path, f"hold {strange[0] if strange else 'too much'}")
            if any(member.compress_type not in _COMPRESSIONS for member in members):
                raise _damaged(path, "are compressed in another way")
            # Read everything before the first write: half of an archive must not replace records.
            if (bad := archive.testzip()) is not None:
                raise _damaged(path, f"cannot be read: {bad} is damaged")
            for member in members:
                _unpack(archive, member, run / member.filename)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    return [member.filename for member in members]


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """Write one file; a line that was being written when it was packed is left out."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, atomic_write(target) as file:
        written = whole = 0  # whole: the bytes up to the end of the last whole line
        while block := source.read(_BLOCK_BYTES):
            if (newline := block.rfind(b"\n")) >= 0:
                whole = written + newline + 1
            written += file.write(block)
        if target.suffix != ".json":
            file.truncate(whole)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the records of the checkpoint {what}", where=str(path), fix="none is needed")

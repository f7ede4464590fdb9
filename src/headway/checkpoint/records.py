"""Records of a run that travel with its remote checkpoints: ledger, metrics, attempts and the cursors of trackers.

Tensors alone continue a run. Its proof of rows, its curves, what it has spent and what trackers have got are in other
files of the run directory. Every checkpoint of a run with a remote tier takes them along in one archive, whose hash is
in the manifest, so that a signature covers it. A run that starts on another disk continues them from there.

Files of lines only grow. What has filled a segment of one goes to the tier once, for all checkpoints that follow:

    metrics.jsonl   |---- segment ----|---- segment ----|-- rest --|
                     sent once, and named by its hash    in records.zip of the checkpoint
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.core.audit import AUDIT_FILE
from headway.core.errors import CheckpointError
from headway.core.files.atomic import atomic_write
from headway.core.files.hashes import sha256_file

#: Key of a manifest's context: size and hash of the archive, and when it was made.
RECORDS = "records"
#: The archive, in the folder of the checkpoint.
RECORDS_FILE = "records.zip"
#: What travels. The lines that trackers have got are read first: they are never more than the metrics that follow.
_PATTERNS = (
    "tracking/*.json",
    "attempts/*/attempt.json",
    AUDIT_FILE,
    "ledger.jsonl",
    "hashes.jsonl",
    "metrics.jsonl",
)
_NAMES = re.compile(
    r"tracking/[A-Za-z0-9][A-Za-z0-9._-]*\.json|attempts/[0-9]{3,9}/attempt\.json|(audit|ledger|hashes|metrics)\.jsonl"
)
#: Folder of the segments in the tier. Their names end as the archive's does.
SEGMENTS = "records"
#: Least bytes of a segment: about 30,000 steps of metrics, 5 MB when compressed.
_SEGMENT_BYTES = 2**24
_HASH = re.compile(r"[0-9a-f]{64}")
#: Most bytes of all files. Metrics take about 0.5 KB a step.
_MOST_BYTES = 64 * 2**30
_BLOCK_BYTES = 2**20
_COMPRESSIONS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


@dataclass(frozen=True)
class Segment:
    """Whole lines of a file, which later ones follow."""

    file: str
    start: int
    end: int
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the tier."""
        return f"{SEGMENTS}/{self.sha256}-{RECORDS_FILE}"

    def write(self, run: Path, path: Path) -> None:
        """Write it as an archive of its own.

        Raises:
            ValueError: The file has other lines now.
            OSError: It cannot be read or written.
        """
        digest = hashlib.sha256()
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
            archive.open(self.file, "w", force_zip64=True) as target,
        ):
            for block in _blocks(run / self.file, self.start, self.end):
                digest.update(block)
                target.write(block)
        if digest.hexdigest() != self.sha256:
            raise ValueError(f"{self.file} has changed since")


def segments_of(entry: Mapping[str, Any]) -> list[Segment]:
    """Return the segments that an entry in a manifest's context names.

    Raises:
        ValueError: The entry is damaged.
    """
    listed = entry.get("segments", [])
    found = list[Segment]()
    ends = dict[str, int]()
    if not isinstance(listed, list):
        raise ValueError("the list of segments is damaged")
    for values in listed:
        if not isinstance(values, dict) or values.keys() != {"file", "start", "end", "sha256"}:
            raise ValueError("a segment is damaged")
        segment = Segment(**values)
        are_names = _NAMES.fullmatch(str(segment.file)) and _HASH.fullmatch(str(segment.sha256))
        start = ends.get(segment.file, 0) if are_names else 0
        if not are_names or segment.start != start or not isinstance(segment.end, int) or segment.end <= start:
            raise ValueError("a segment is damaged")
        ends[segment.file] = segment.end
        found.append(segment)
    return found


class RecordsPacker:
    """Packs the records of a run with each checkpoint, and remembers the segments of its files.

    Args:
        run: The run directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._segments: dict[str, list[Segment]] = {}

    def pack(self, folder: Path) -> dict[str, Any]:
        """Write the records into the folder of a checkpoint, and return their entry in the manifest's context.

        Raises:
            OSError: The archive cannot be written.
        """
        path = folder / RECORDS_FILE
        segments = list[Segment]()
        try:
            with path.open("wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    for name in record_names(self._run):
                        of_file = self._cut(name) if name.endswith(".jsonl") else []
                        segments += of_file
                        with archive.open(name, "w", force_zip64=True) as target:
                            for block in _blocks(self._run / name, of_file[-1].end if of_file else 0, None):
                                target.write(block)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        entry = {"sha256": sha256_file(path), "bytes": path.stat().st_size, "time": time.time()}
        return {**entry, "segments": list(map(asdict, segments))} if segments else entry

    def _cut(self, name: str) -> list[Segment]:
        """Return the segments of a file; those that are known are not read again."""
        known = self._segments.setdefault(name, [])
        start = known[-1].end if known else 0
        size = (self._run / name).stat().st_size
        while size - start >= _SEGMENT_BYTES:
            digest = hashlib.sha256()
            end = start
            for block in _blocks(self._run / name, start, None):
                # The first end of a line that makes it long enough, so that every process cuts alike.
                newline = block.find(b"\n", max(_SEGMENT_BYTES - (end - start) - 1, 0))
                digest.update(block[: newline + 1] if newline >= 0 else block)
                if newline >= 0:
                    known.append(Segment(name, start, end + newline + 1, digest.hexdigest()))
                    break
                end += len(block)
            else:
                break  # a line that has no end
            start = known[-1].end
        return known


def _blocks(path: Path, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of a part of a file; what is appended meanwhile is left out."""
    with path.open("rb") as file:
        left = (path.stat().st_size if end is None else end) - file.seek(start)
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            yield block


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
        path: The archive, in the folder that the segments were fetched to.
        entry: Its entry in the manifest's context.
        run: The run directory.

    Raises:
        CheckpointError: It is not the archive that the manifest names, or holds something else than records.
        OSError: The records cannot be written.
    """
    if path.stat().st_size != entry.get("bytes") or sha256_file(path) != entry.get("sha256"):
        raise _damaged(path, "differ from what was saved")
    try:
        segments = segments_of(entry)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            strange = [member.filename for member in members if not _NAMES.fullmatch(member.filename)]
            size = sum(member.file_size for member in members) + sum(one.end - one.start for one in segments)
            if strange or size > _MOST_BYTES:
                raise _damaged(path, f"hold {strange[0] if strange else 'too much'}")
            _check_compression(path, members)
            # Read everything before the first write: half of an archive must not replace records.
            if (bad := archive.testzip()) is not None:
                raise _damaged(path, f"cannot be read: {bad} is damaged")
            for segment in segments:
                _check_segment(path.parent / segment.name, segment)
            for member in members:
                here = run / member.filename
                if member.filename == AUDIT_FILE and here.exists() and not _continues(archive, AUDIT_FILE, here):
                    continue  # what was done here since is in no other log
                earlier = [path.parent / segment.name for segment in segments if segment.file == member.filename]
                _unpack([*earlier, path], member.filename, run / member.filename)
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, RuntimeError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    return [member.filename for member in members]


def _check_compression(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    if any(member.compress_type not in _COMPRESSIONS for member in members):
        raise _damaged(path, "are compressed in another way")


def _check_segment(path: Path, segment: Segment) -> None:
    digest = hashlib.sha256()
    left = segment.end - segment.start
    with zipfile.ZipFile(path) as archive:
        _check_compression(path, archive.infolist())
        with archive.open(segment.file) as source:
            while left >= 0 and (block := source.read(_BLOCK_BYTES)):
                digest.update(block)
                left -= len(block)
    if left or digest.hexdigest() != segment.sha256:
        raise ValueError(f"a segment of {segment.file} differs from what was saved")


def _unpack(parts: Iterable[Path], name: str, target: Path) -> None:
    """Write one file; a line that was being written when it was packed is left out.

    The archives of its parts are opened one at a time: a long run has more of them than a process may have open files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        written = whole = 0  # whole: the bytes up to the end of the last whole line
        for part in parts:
            with zipfile.ZipFile(part) as archive, archive.open(name) as source:
                while block := source.read(_BLOCK_BYTES):
                    if (newline := block.rfind(b"\n")) >= 0:
                        whole = written + newline + 1
                    written += file.write(block)
        if target.suffix != ".json":
            file.truncate(whole)


def _continues(archive: zipfile.ZipFile, name: str, path: Path) -> bool:
    """Return whether a file of an archive begins with all that is in a file here."""
    with archive.open(name) as source, path.open("rb") as here:
        return all(source.read(len(block)) == block for block in iter(lambda: here.read(_BLOCK_BYTES), b""))


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the records of the checkpoint {what}", where=str(path), fix="none is needed")

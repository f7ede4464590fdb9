"""The identity of a store's input: a hash for every file, or span of a file, of a unit.

Local bytes are hashed. A file is not read again if its size, change time and inode are as they were at its last hash.
A file at a URL is identified by the version that its server reports. Results are recorded under these identities, so a
file must not change from its listing until its last byte is read, which may be hours later. This module checks that
too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from headway.core.errors import DataError
from headway.core.files.atomic import atomic_write
from headway.core.files.foreign import LISTING_BYTES, read_json_or_empty, readable_json_object
from headway.text.preparing.units import Unit
from headway.text.reading.pieces import Piece
from headway.text.reading.places import SourceFile, open_file, stamp_of, unreadable

_BLOCK = 2**22
# A file that changed this shortly before its hash may change again with an equal change time (as in git's index).
_RACY_NS = 2 * 10**9
# Minimum limit on the bytes that are hashed behind a span, up to the end of its last line.
_LINE = 2**30
# Bytes that are hashed between two saves: half a minute's work on a fast disk, the most that a kill loses.
_SAVED_BYTES = 2**34


class InputHashes:
    """Hashes of inputs, cached in a file.

    Args:
        memories: Cache files of earlier preparations.
        keep: Cache file for intermediate saves.
        fresh: Ignore the caches and read every file again.
    """

    def __init__(self, *memories: Path, keep: Path | None = None, fresh: bool = False) -> None:
        self._known: dict[str, list[Any]] = {}
        for memory in () if fresh else memories:
            self._known |= read_json_or_empty(memory)
        self._keep = keep
        self._unsaved_bytes = 0
        self._used: dict[str, list[Any]] = {}
        self._racy: set[str] = set()
        self._stamps: dict[str, str] = {}

    def of(self, unit: Unit) -> list[dict[str, Any]]:
        """Describe a unit's input: per file its name, format, bytes, span if it is not whole, and SHA-256 or version.

        Raises:
            DataError: A file cannot be read.
        """
        return [self._part(pieces) for pieces in _by_file(unit)]

    def _part(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        file = pieces[0].file
        facts = _outline(pieces)
        if pieces[0].texts is not None:
            return facts | {"sha256": _hash_texts(pieces)}
        if not file.local and file.version:
            return facts | {"version": file.version}
        # Only lines are identified by their own bytes; row groups need the footer, which is elsewhere in the file.
        span = facts.get("span") if file.format == "jsonl" else None
        lines = (span[0], span[1]) if span else None
        return facts | {"sha256": self._hash(file, lines, pieces[0].most)}

    def check_unchanged(self, file: SourceFile) -> str:
        """Check that a file is as it was when it was listed and at every earlier check; return its stamp.

        Raises:
            DataError: The file has changed or is gone.
        """
        now = stamp_of(file)
        if self._stamps.setdefault(_place(file), now) != now or not _as_listed(file, now):
            raise DataError(
                "an input file changed while it was read", where=file.location, fix="prepare again when it is at rest"
            )
        return now

    def _hash(self, file: SourceFile, lines: tuple[int, int] | None, most: int) -> str:
        key = _place(file) + (f"#{lines[0]}-{lines[1]}" if lines else "")
        stamp = self.check_unchanged(file)
        known = self._used.get(key) or self._known.get(key)
        if known is None or known[0] != stamp:
            now = time.time_ns()
            known = [stamp, _hash_lines(file, lines, most)]
            self.check_unchanged(file)
            if not file.local or now - file.path.stat().st_ctime_ns <= _RACY_NS:
                self._racy.add(key)
            self._unsaved_bytes += lines[1] - lines[0] if lines else file.bytes
        self._used[key] = known
        if self._keep is not None and self._unsaved_bytes >= _SAVED_BYTES:
            # Save the known hashes that were not requested yet, too: after a kill they would be lost.
            self._save(self._keep, self._known)
        return str(known[1])

    def save(self, memory: Path) -> None:
        """Save the hashes that were requested, and no others."""
        self._save(memory, {})

    def _save(self, memory: Path, others: dict[str, list[Any]]) -> None:
        self._unsaved_bytes = 0
        remembered = others | {key: known for key, known in self._used.items() if key not in self._racy}
        if remembered != readable_json_object(memory, LISTING_BYTES):
            with atomic_write(memory, "w") as file:
                json.dump(remembered, file)


def outlines_of(unit: Unit) -> list[dict[str, Any]]:
    """Describe a unit as `InputHashes.of` does, but without hashes or versions, so that nothing is read."""
    return [_outline(pieces) for pieces in _by_file(unit)]


def _by_file(unit: Unit) -> Iterator[list[Piece]]:
    return (list(pieces) for _, pieces in groupby(unit.pieces, key=lambda piece: piece.file))


def _outline(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Describe a file's pieces in a unit: how it is read, bytes, and their span if they are not the whole file."""
    file = pieces[0].file
    start = pieces[0].span
    end = pieces[-1].span
    size = sum(piece.bytes for piece in pieces)
    facts: dict[str, Any] = {"path": file.name, "format": file.format, "bytes": size}
    if file.compression:
        facts["compression"] = file.compression
    if file.delimiter != ",":
        facts["delimiter"] = file.delimiter
    if file.field is not None:
        facts["field"] = file.field
    if start is not None and end is not None and size != file.bytes:
        facts["span"] = [start[0], end[1]]
    return facts


def files_of(unit: Unit) -> list[SourceFile]:
    """Return the files of a unit; none if it belongs to a stream."""
    return [file for file in dict.fromkeys(piece.file for piece in unit.pieces) if file.format != "stream"]


def _place(file: SourceFile) -> str:
    return str(file.path.absolute()) if file.local else file.location


def _as_listed(file: SourceFile, stamp: str) -> bool:
    """Return whether a stamp is consistent with the file as it was listed."""
    size, _, version = stamp.partition(":")
    if int(size) != file.bytes:
        return False
    # If a server reports a time instead of a checksum, listings may report it with less precision.
    kinds = {text.partition(":")[0] for text in (version, file.version or "")}
    return file.local or len(kinds) > 1 or kinds.pop().isdigit() or version == file.version


def _hash_texts(pieces: Sequence[Piece]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        bad = [[document.where, document.reason] for document in piece.bad]
        empty = sum(count for _, count in piece.empty)
        digest.update(json.dumps([piece.texts, bad, empty]).encode())
    return digest.hexdigest()


def _hash_lines(file: SourceFile, lines: tuple[int, int] | None, most: int) -> str:
    """Compute the SHA-256 of a file, or of its bytes [start, end) and on to the end of the line that is cut there.

    A line longer than `most` bytes is not used. So if a large file is one line, a unit does not read all that follows.
    Each unit reads a fixed length at least, since a store must not depend on the limit at its first preparation.
    """
    most = max(most, _LINE)
    digest = hashlib.sha256()
    try:
        with open_file(file, *(lines or (0, None))) as stream:
            for block in _blocks(stream, lines, most):
                digest.update(block)
    except OSError as error:
        raise unreadable(file.location, error) from error
    return digest.hexdigest()


def _blocks(stream: BinaryIO, lines: tuple[int, int] | None, most: int) -> Iterator[bytes]:
    if lines is None:
        while block := stream.read(_BLOCK):
            yield block
        return
    # The byte before decides whether the first line begins here.
    left = lines[1] - stream.seek(max(0, lines[0] - 1))
    last = b""
    while left > 0 and (block := stream.read(min(_BLOCK, left))):
        yield block
        left -= len(block)
        last = block[-1:]
    behind = 0
    while last != b"\n" and behind <= most and (block := stream.readline(_BLOCK)):
        yield block
        behind = behind + len(block)
        last = block[-1:]

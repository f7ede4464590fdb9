"""What goes into a store, by content: a hash for every file, or span of one, that units are made of.

Local bytes are hashed; a file whose size, time of change and inode are as they were when it was hashed last is not read
again. What lies at a URL is known by the version that its server tells. Results are kept under these names, so a file
must stay as it was listed and hashed until the last of it is read, which may be hours later: that is seen to here too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from headway.core.errors import DataError, HeadwayError
from headway.core.files import atomic_write
from headway.core.foreign import LISTING_BYTES, read_json_object
from headway.data.preparing.units import Unit
from headway.data.reading.pieces import Piece
from headway.data.reading.places import SourceFile, open_file, stamp_of, unreadable

_BLOCK = 2**22
# A file that changed so shortly before it was hashed may change again without its time telling (as in git's index).
_RACY_NS = 2 * 10**9
# Bytes of a line behind a span that are hashed in any case.
_LINE = 2**30
# Input that is hashed between two saves, half a minute's work on a fast disk: what a kill costs at most.
_SAVED_BYTES = 2**34


class InputHashes:
    """Hashes of inputs, remembered in a file.

    Args:
        memories: Where they may be remembered from earlier preparations.
        keep: Where to save them now and then on the way.
        fresh: Read every file again, whatever is remembered.
    """

    def __init__(self, *memories: Path, keep: Path | None = None, fresh: bool = False) -> None:
        self._known: dict[str, list[Any]] = {}
        for memory in () if fresh else memories:
            self._known |= _read(memory)
        self._keep, self._unsaved_bytes = keep, 0
        self._used: dict[str, list[Any]] = {}
        self._racy: set[str] = set()
        self._stamps: dict[str, str] = {}
        self._ahead: Future[tuple[Unit, list[dict[str, Any]]] | None] | None = None

    def begin(self, unit: Callable[[], Unit | None]) -> None:
        """Begin to hash the unit that will be asked for first, while something else is done; a failure waits until
        then."""
        pool = ThreadPoolExecutor(1, "headway-hash")
        self._ahead = pool.submit(self._begun, unit)
        pool.shutdown(wait=False)

    def _begun(self, unit: Callable[[], Unit | None]) -> tuple[Unit, list[dict[str, Any]]] | None:
        try:
            first = unit()
            return None if first is None else (first, self._of(first))
        except HeadwayError:
            return None

    def of(self, unit: Unit) -> list[dict[str, Any]]:
        """What the unit's text comes from: per file its name, format, bytes, and SHA-256 or version; spans of large
        files with the span.

        Raises:
            DataError: a file cannot be read.
        """
        ahead, self._ahead = self._ahead, None
        begun = ahead.result() if ahead is not None else None
        return begun[1] if begun is not None and begun[0] == unit else self._of(unit)

    def _of(self, unit: Unit) -> list[dict[str, Any]]:
        return [self._part(pieces) for pieces in _by_file(unit)]

    def _part(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        file, facts = pieces[0].file, _outline(pieces)
        if pieces[0].texts is not None:
            return facts | {"sha256": _hash_texts(pieces)}
        if not file.local and file.version:
            return facts | {"version": file.version}
        # Only lines can be told by their bytes; row groups need the footer, which is anywhere in the file.
        span = facts.get("span") if file.format == "jsonl" else None
        lines = (span[0], span[1]) if span else None
        return facts | {"sha256": self._hash(file, lines, pieces[0].most)}

    def stay(self, file: SourceFile) -> str:
        """See that a file is as it was when it was listed, and whenever this was asked before; returns its stamp.

        Raises:
            DataError: it has changed, or is gone.
        """
        now = stamp_of(file)
        if self._stamps.setdefault(_place(file), now) != now or not _as_listed(file, now):
            raise DataError(
                "an input file changed while it was read", where=file.location, fix="prepare again when it is at rest"
            )
        return now

    def _hash(self, file: SourceFile, lines: tuple[int, int] | None, most: int) -> str:
        key = _place(file) + (f"#{lines[0]}-{lines[1]}" if lines else "")
        stamp = self.stay(file)
        known = self._used.get(key) or self._known.get(key)
        if known is None or known[0] != stamp:
            now = time.time_ns()
            known = [stamp, _hash_lines(file, lines, most)]
            self.stay(file)
            if not file.local or now - file.path.stat().st_ctime_ns <= _RACY_NS:
                self._racy.add(key)
            self._unsaved_bytes += lines[1] - lines[0] if lines else file.bytes
        self._used[key] = known
        if self._keep is not None and self._unsaved_bytes >= _SAVED_BYTES:
            # What was not asked for yet may still be: a kill must not cost what others before had remembered.
            self._save(self._keep, self._known)
        return str(known[1])

    def save(self, memory: Path) -> None:
        """Remember the hashes that were asked for, and no others."""
        self._save(memory, {})

    def _save(self, memory: Path, others: dict[str, list[Any]]) -> None:
        self._unsaved_bytes = 0
        remembered = others | {key: known for key, known in self._used.items() if key not in self._racy}
        if remembered != _read(memory):
            with atomic_write(memory, "w") as file:
                json.dump(remembered, file)


def outlines_of(unit: Unit) -> list[dict[str, Any]]:
    """What `InputHashes.of` says of a unit, without the hashes or versions: for this nothing is read."""
    return [_outline(pieces) for pieces in _by_file(unit)]


def _by_file(unit: Unit) -> Iterator[list[Piece]]:
    return (list(pieces) for _, pieces in groupby(unit.pieces, key=lambda piece: piece.file))


def _outline(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Of one file's pieces in a unit: its name and format, their bytes, and their span when they are not all of it."""
    file, start, end = pieces[0].file, pieces[0].span, pieces[-1].span
    size = sum(piece.bytes for piece in pieces)
    facts: dict[str, Any] = {"path": file.name, "format": file.format, "bytes": size}
    if file.compression:
        facts["compression"] = file.compression
    if start is not None and end is not None and size != file.bytes:
        facts["span"] = [start[0], end[1]]
    return facts


def files_of(unit: Unit) -> list[SourceFile]:
    """The files of a unit; none when it is of a stream."""
    return [file for file in dict.fromkeys(piece.file for piece in unit.pieces) if file.format != "stream"]


def _place(file: SourceFile) -> str:
    return str(file.path.absolute()) if file.local else file.location


def _as_listed(file: SourceFile, stamp: str) -> bool:
    """Whether a stamp can be that of the file as it was listed."""
    size, _, version = stamp.partition(":")
    if int(size) != file.bytes:
        return False
    # Where a server tells no checksum but a time, listings may tell it less exactly.
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
    """SHA-256 of a file, or of bytes [start, end) of it and on to the end of the line that is cut there.

    Of a line that is longer than `most` bytes nothing is used. So where a large file is one line, no unit reads all
    that follows; but each reads a fixed length at least, since a store must not tell which limit it was begun with.
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
    # The byte before tells whether the first line begins here.
    left = lines[1] - stream.seek(max(0, lines[0] - 1))
    last = b""
    while left > 0 and (block := stream.read(min(_BLOCK, left))):
        yield block
        left -= len(block)
        last = block[-1:]
    behind = 0
    while last != b"\n" and behind <= most and (block := stream.readline(_BLOCK)):
        yield block
        behind, last = behind + len(block), block[-1:]


def _read(memory: Path) -> dict[str, list[Any]]:
    try:
        return read_json_object(memory, LISTING_BYTES)
    except (OSError, ValueError):
        return {}

"""The part of a checkpoint that one worker writes, and the notes that make it known to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.format.file_layout import Piece, ShardFile, Source, write_file
from headway.checkpoint.format.manifest import FileEntry
from headway.core.machine.cores import usable_cores


@dataclass(frozen=True)
class WrittenPiece:
    """A piece of a tensor, and its place in a file."""

    piece: Piece
    file: str
    begin: int
    """Offset of its elements in bytes, from the start of the file or, if it is sealed, of its content."""
    sha256: str


@dataclass(frozen=True)
class CheckpointPart:
    """The part of a checkpoint that one worker has written."""

    files: dict[str, FileEntry]
    pieces: list[WrittenPiece]

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        files = {name: entry.model_dump() for name, entry in self.files.items()}
        return {"files": files, "pieces": [{**vars(p), "piece": p.piece.record()} for p in self.pieces]}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> CheckpointPart:
        """Parse the JSON form."""
        files = {name: FileEntry(**entry) for name, entry in record["files"].items()}
        return cls(files, [WrittenPiece(**{**p, "piece": Piece.parse(p["piece"])}) for p in record["pieces"]])


def note_name(rank: int) -> str:
    """Return the name of the note that makes a worker's part known."""
    return f"part-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """Return the name of the note that says why a worker's part will not come."""
    return f"failed-{rank:05d}.txt"


def write_part(
    folder: Path,
    files: Iterable[ShardFile],
    source: Source,
    advance: Callable[[], None] = lambda: None,
    key: bytes | None = None,
) -> CheckpointPart:
    """Write and flush the files of one worker into an existing folder; nothing is visible yet.

    Args:
        folder: The folder of the save.
        files: The files to write.
        source: Source of the bytes.
        advance: Called after each file.
        key: Key to encrypt the files with; None leaves them in the clear.

    Raises:
        OSError: The files cannot be written.
    """
    entries: dict[str, FileEntry] = {}
    pieces: list[WrittenPiece] = []
    with ThreadPoolExecutor(usable_cores()) as pool:
        for file in files:
            name, entry, hashes = write_file(folder, file, source, pool, key)
            entries[name] = entry
            advance()
            begin = len(file.preamble)
            for piece in file.pieces:
                pieces.append(WrittenPiece(piece, name, begin, hashes[piece.name]))
                begin += piece.nbytes
    return CheckpointPart(entries, pieces)

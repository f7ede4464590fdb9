"""The layout of a checkpoint's safetensors files, planned before they are written, and the writing itself.

The layout of a safetensors file follows from names, types and sizes alone. So a worker lays out its state in memory as
it will lie on disk, and the writer process needs no tensor library. The writer of the safetensors library does not
suit: it needs all tensors of a file at once, returns no hashes, and reports a full disk without its error number.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.checkpoint.format.file_hash import parts_hash
from headway.checkpoint.format.manifest import ITEM_BYTES, FileEntry, dtype_name
from headway.checkpoint.format.sealing import SEALED, seal, sealed_size
from headway.core.process.faults import fault_point
from headway.core.types import Block

#: Bytes of one write call; the kernel takes at most 2 GiB.
_WRITE_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one worker writes; see `core.types.Block`."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, name: str, block: Block) -> Piece:
        """Describe a block as a piece."""
        return cls(name, dtype_name(name, block.local), block.shape, block.offset, tuple(block.local.shape))

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Piece:
        """Parse the JSON form, which has lists in place of tuples."""
        shape, offset, size = (tuple(record[key]) for key in ("shape", "offset", "size"))
        return cls(record["name"], record["dtype"], shape, offset, size)

    def record(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole tensor."""
        return self.size == self.shape

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.size) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ShardFile:
    """The content of one file except for the tensors' elements."""

    file: str
    preamble: bytes
    """Everything before the elements."""
    pieces: tuple[Piece, ...]
    """The pieces whose elements follow the preamble, without gaps."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.preamble) + sum(piece.nbytes for piece in self.pieces)


def plan_files(pieces: Sequence[Piece], rank: int, max_bytes: int) -> list[ShardFile]:
    """Plan the files of one worker, filled in order of tensor names.

    Args:
        pieces: Pieces that the worker writes.
        rank: Rank of the worker, which is part of the file names.
        max_bytes: Approximate size of a file; a larger tensor gets a file of its own.
    """
    files: list[list[Piece]] = []
    room = 0
    for piece in sorted(pieces, key=lambda piece: piece.name):
        if piece.nbytes > room or not files:
            files.append([])
            room = max_bytes
        files[-1].append(piece)
        room -= piece.nbytes
    names = (f"shard-{rank:05d}{f'-{i:03d}' if i else ''}.safetensors" for i in range(len(files)))
    return [_shard_file(name, members) for name, members in zip(names, files, strict=True)]


def _shard_file(file: str, pieces: Sequence[Piece]) -> ShardFile:
    # Wide elements first, as the library does, so that every tensor is aligned when the file is mapped.
    ordered = sorted(pieces, key=lambda piece: (-ITEM_BYTES[piece.dtype], piece.name))
    header: dict[str, Any] = {}
    end = 0
    for piece in ordered:
        start = end
        end = end + piece.nbytes
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.size), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad with spaces, as the format allows: a copy to elements not aligned to a cache line takes a quarter longer.
    text += b" " * (-(8 + len(text)) % 64)
    return ShardFile(file, len(text).to_bytes(8, "little") + text, tuple(ordered))


class Source(Protocol):
    """The source of the bytes of a worker's part."""

    def elements(self, piece: Piece) -> memoryview:
        """Return the bytes of a piece."""
        ...

    def copy(self, file: ShardFile, descriptor: int) -> None:
        """Write a whole file."""
        ...


@dataclass(frozen=True)
class Elements:
    """A source whose bytes lie anywhere in this process's memory."""

    elements: Callable[[Piece], memoryview]

    def copy(self, file: ShardFile, descriptor: int) -> None:
        """Write a whole file, one piece after the other."""
        for view in (memoryview(file.preamble), *map(self.elements, file.pieces)):
            left = view.cast("B")
            while left:
                left = left[os.write(descriptor, left[:_WRITE_BYTES]) :]


def write_file(
    folder: Path, file: ShardFile, source: Source, pool: Executor, key: bytes | None = None
) -> tuple[str, FileEntry, dict[str, str]]:
    """Write one file and flush it to disk.

    Args:
        folder: The folder of the save.
        file: The file to write.
        source: Source of the bytes.
        pool: Threads that hash while this thread writes; hashing releases the interpreter lock.
        key: Key to encrypt the file with, which then gets another name; None leaves it in the clear.

    Returns:
        The file's name, its size and hash, and the SHA-256 of each piece. The hashes are of the bytes in memory, so
        that a later check finds what a disk or its driver changed.

    Raises:
        OSError: The file cannot be written.
    """
    data = [source.elements(piece) for piece in file.pieces]
    digests = [pool.submit(_digest, view) for view in data]
    name, size = (file.file, file.nbytes) if key is None else (file.file + SEALED, sealed_size(file.nbytes))
    with (folder / name).open("wb", buffering=0) as stream:
        if key is None:
            source.copy(file, stream.fileno())
        else:
            hashed = _HashingWriter(stream)
            seal(_JoinedReader([file.preamble, *data]), hashed, key, file.file)
        fault_point("checkpoint.shard")
        os.fsync(stream.fileno())
    hashes = {piece.name: digest.result() for piece, digest in zip(file.pieces, digests, strict=True)}
    if key is None:
        return name, FileEntry(bytes=size, parts_sha256=parts_hash(file.preamble, hashes.values())), hashes
    return name, FileEntry(bytes=size, sha256=hashed.hexdigest()), hashes


class _JoinedReader:
    """A stream that reads several pieces of memory one after the other."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = deque(memoryview(part).cast("B") for part in parts)

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; fewer only at the end."""
        found = []
        while count and self._parts:
            part = self._parts.popleft()
            found.append(part[:count])
            if len(part) > count:
                self._parts.appendleft(part[count:])
            count -= len(found[-1])
        return b"".join(found)


class _HashingWriter:
    """A file, and the hash of what is written to it."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes) -> None:
        """Write all of the content, in several calls if the system takes it in parts."""
        self._digest.update(content)
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def hexdigest(self) -> str:
        """Return the hash of everything written."""
        return self._digest.hexdigest()


def _digest(elements: memoryview) -> str:
    return hashlib.sha256(elements).hexdigest()

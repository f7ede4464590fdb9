"""Files of a checkpoint, planned before they are written: what lies where in each, and their bytes on the way to disk.

A file is a safetensors file, whose layout follows from names, types and sizes alone. So a worker can lay out its state
in memory as it will lie on the disk, and whoever writes it needs to know nothing of tensors. The library's own writer
wants all tensors of a file in its hands, and tells neither hashes nor a full disk by its number.
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
from typing import TYPE_CHECKING, Any, Protocol

from headway.checkpoint.format.file_hash import parts_hash
from headway.checkpoint.format.manifest import ITEM_BYTES, FileEntry, dtype_name
from headway.checkpoint.format.sealing import SEALED, seal, sealed_size
from headway.core.faults import fault_point

if TYPE_CHECKING:
    from headway.core.types import Block

#: One call writes no more than this; the kernel takes at most 2 GiB.
_WRITE_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Piece:
    """What one worker writes of a tensor; see `core.types.Block`."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, name: str, block: Block) -> Piece:
        """The piece that a block is."""
        return cls(name, dtype_name(name, block.local), block.shape, block.offset, tuple(block.local.shape))

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Piece:
        """From its JSON form, which has lists."""
        shape, offset, size = (tuple(record[key]) for key in ("shape", "offset", "size"))
        return cls(record["name"], record["dtype"], shape, offset, size)

    def record(self) -> dict[str, Any]:
        """Its JSON form."""
        return asdict(self)

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.size == self.shape

    @property
    def nbytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.size) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ShardFile:
    """One file, byte for byte, but for the tensors' elements."""

    file: str
    preamble: bytes
    """Everything before the elements."""
    pieces: tuple[Piece, ...]
    """Whose elements follow, one after the other without a gap."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.preamble) + sum(piece.nbytes for piece in self.pieces)


def plan_files(pieces: Sequence[Piece], rank: int, max_bytes: int) -> list[ShardFile]:
    """The files of one worker, in the order of tensor names; a tensor larger than `max_bytes` gets one of its own."""
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
        start, end = end, end + piece.nbytes
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.size), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces. A copy to what is not aligned to a line of the cache takes a quarter longer.
    text += b" " * (-(8 + len(text)) % 64)
    return ShardFile(file, len(text).to_bytes(8, "little") + text, tuple(ordered))


class Source(Protocol):
    """Where the bytes of a worker's part are."""

    def elements(self, piece: Piece) -> memoryview:
        """Those of a piece."""
        ...

    def copy(self, image: ShardFile, descriptor: int) -> None:
        """Write a whole file."""
        ...


@dataclass(frozen=True)
class Elements:
    """Bytes that lie anywhere in this process's memory."""

    elements: Callable[[Piece], memoryview]

    def copy(self, image: ShardFile, descriptor: int) -> None:
        """Write a whole file, a piece after the other."""
        for view in (memoryview(image.preamble), *map(self.elements, image.pieces)):
            left = view.cast("B")
            while left:
                left = left[os.write(descriptor, left[:_WRITE_BYTES]) :]


def write_file(
    folder: Path, image: ShardFile, source: Source, pool: Executor, key: bytes | None = None
) -> tuple[str, FileEntry, dict[str, str]]:
    """Write one file and flush it to disk.

    Args:
        folder: Where to.
        image: What.
        source: Has the bytes.
        pool: Hashes while this thread writes; hashing lets go of the interpreter's lock.
        key: Seals the file, which then has another name.

    Returns:
        The file's name, its size and hash, and the SHA-256 of each piece; both of the bytes as they were in memory, so
        that what a disk or its driver changes on the way is found later.

    Raises:
        OSError: the file cannot be written.
    """
    data = [source.elements(piece) for piece in image.pieces]
    digests = [pool.submit(_digest, view) for view in data]
    name, size = (image.file, image.nbytes) if key is None else (image.file + SEALED, sealed_size(image.nbytes))
    with (folder / name).open("wb", buffering=0) as file:
        if key is None:
            source.copy(image, file.fileno())
        else:
            hashed = _Hashed(file)
            seal(_Joined([image.preamble, *data]), hashed, key, image.file)
        fault_point("checkpoint.shard")
        os.fsync(file.fileno())
    hashes = {piece.name: digest.result() for piece, digest in zip(image.pieces, digests, strict=True)}
    if key is None:
        return name, FileEntry(bytes=size, parts_sha256=parts_hash(image.preamble, hashes.values())), hashes
    return name, FileEntry(bytes=size, sha256=hashed.hexdigest()), hashes


class _Joined:
    """Pieces of memory, read as one stream."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = deque(memoryview(part).cast("B") for part in parts)

    def read(self, count: int) -> bytes:
        """The next bytes; fewer at the end only."""
        found = []
        while count and self._parts:
            part = self._parts.popleft()
            found.append(part[:count])
            if len(part) > count:
                self._parts.appendleft(part[count:])
            count -= len(found[-1])
        return b"".join(found)


class _Hashed:
    """A file, and the hash of what is written to it."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, content: bytes) -> None:
        """Write all of it, which the system may do in steps."""
        self._digest.update(content)
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def hexdigest(self) -> str:
        """Of all that was written."""
        return self._digest.hexdigest()


def _digest(elements: memoryview) -> str:
    return hashlib.sha256(elements).hexdigest()

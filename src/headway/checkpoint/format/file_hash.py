"""The hash of a safetensors file, computed from the hashes of its parts.

The tensors are hashed anyway, several at a time. One hash over the whole file would keep one core busy for longer than
a fast disk takes to write it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.files.foreign import open_regular, parse_json
from headway.core.files.hashes import sha256_file
from headway.core.machine.cores import usable_cores

if TYPE_CHECKING:
    from headway.checkpoint.format.manifest import FileEntry

#: Longest header that the safetensors library accepts.
_HEADER_BYTES = 100_000_000
#: Bytes read at a time.
_READ_BYTES = 1024**2


def parts_hash(preamble: bytes, tensors: Iterable[str]) -> str:
    """Return the SHA-256 of the concatenated binary SHA-256s of the preamble and of each tensor's elements.

    Args:
        preamble: Everything before the elements.
        tensors: Hex SHA-256 of each tensor's elements, in the order of the file.
    """
    digests = (hashlib.sha256(preamble).digest(), *map(bytes.fromhex, tensors))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def is_as_written(path: Path, entry: FileEntry, threads: int | None = None) -> bool:
    """Return whether a file has the hash that a manifest gives for it.

    Args:
        path: The file.
        entry: Its entry in the manifest.
        threads: Number of threads; as many as there are cores if None.

    Raises:
        OSError: The file cannot be read.
    """
    if entry.parts_sha256 is None:
        return sha256_file(path) == entry.sha256
    return _parts_hash_of(path, threads or usable_cores()) == entry.parts_sha256


def _parts_hash_of(path: Path, threads: int) -> str | None:
    """Return the hash of a file from its parts; None if it is no safetensors file.

    The file is read, not mapped: a disk error in a mapped file would kill the process.
    """
    with open_regular(path) as file:
        descriptor = file.fileno()
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(size - 8, _HEADER_BYTES):
            return None
        preamble = os.pread(descriptor, 8 + length, 0)
        spans = _spans(preamble[8:], size - len(preamble))
        if spans is None:
            return None

        def digest(span: tuple[int, int]) -> str:
            # Of as much of it as exists.
            begin = len(preamble) + span[0]
            end = len(preamble) + span[1]
            hasher = hashlib.sha256()
            while begin < end and (read := os.pread(descriptor, min(_READ_BYTES, end - begin), begin)):
                hasher.update(read)
                begin += len(read)
            return hasher.hexdigest()

        with ThreadPoolExecutor(threads) as pool:
            return parts_hash(preamble, pool.map(digest, spans))


def _spans(header: bytes, nbytes: int) -> list[tuple[int, int]] | None:
    """Return the begin and end of each tensor's elements; None if they leave gaps or do not fill the file."""
    try:
        spans = sorted(
            (int(begin), int(end)) for begin, end in (e["data_offsets"] for e in parse_json(header).values())
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    ends = [0, *(end for _, end in spans)]
    follow = [begin for begin, _ in spans] == ends[:-1] and ends[-1] == nbytes
    return spans if follow and all(begin <= end for begin, end in spans) else None

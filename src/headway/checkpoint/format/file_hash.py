"""The hash of a safetensors file, out of the hashes of its parts: its tensors are hashed in any case, and several at a
time. One hash over all of a file takes one core as long as it takes, which is longer than a fast disk does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.cores import usable_cores
from headway.core.files import sha256_file
from headway.core.foreign import open_regular, parse_json

if TYPE_CHECKING:
    from headway.checkpoint.format.manifest import FileEntry

#: No header is longer (the safetensors library's own limit); read at a time.
_HEADER_BYTES, _READ_BYTES = 100_000_000, 1024**2


def parts_hash(preamble: bytes, tensors: Iterable[str]) -> str:
    """SHA-256 of the SHA-256s, as bytes, of all that lies before the elements, and of the elements of each tensor.

    Args:
        preamble: The former.
        tensors: Hex SHA-256 of the latter, in the order in which they lie in the file.
    """
    digests = (hashlib.sha256(preamble).digest(), *map(bytes.fromhex, tensors))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def is_as_written(path: Path, entry: FileEntry, threads: int | None = None) -> bool:
    """Whether a file has the hash that a manifest gives for it.

    Args:
        threads: That share the work; as many as there are cores when not given.

    Raises:
        OSError: it cannot be read.
    """
    if entry.parts_sha256 is None:
        return sha256_file(path) == entry.sha256
    return _parts_hash_of(path, threads or usable_cores()) == entry.parts_sha256


def _parts_hash_of(path: Path, threads: int) -> str | None:
    """None when the file is no such file. It is read, not mapped: an error of the disk would end the process."""
    with open_regular(path) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(size - 8, _HEADER_BYTES):
            return None
        preamble = os.pread(descriptor, 8 + length, 0)
        spans = _spans(preamble[8:], size - len(preamble))
        if spans is None:
            return None

        def digest(span: tuple[int, int]) -> str:
            return _digest(descriptor, len(preamble) + span[0], len(preamble) + span[1])

        with ThreadPoolExecutor(threads) as pool:
            return parts_hash(preamble, pool.map(digest, spans))


def _spans(header: bytes, nbytes: int) -> list[tuple[int, int]] | None:
    """Where the elements of each tensor begin and end; None when they do not follow one another to the end."""
    try:
        spans = sorted(
            (int(begin), int(end)) for begin, end in (e["data_offsets"] for e in parse_json(header).values())
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    ends = [0, *(end for _, end in spans)]
    follow = [begin for begin, _ in spans] == ends[:-1] and ends[-1] == nbytes
    return spans if follow and all(begin <= end for begin, end in spans) else None


def _digest(descriptor: int, begin: int, end: int) -> str:
    """Of a part of a file, or of what there is of it."""
    hasher = hashlib.sha256()
    while begin < end and (read := os.pread(descriptor, min(_READ_BYTES, end - begin), begin)):
        hasher.update(read)
        begin += len(read)
    return hasher.hexdigest()

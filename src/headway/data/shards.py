"""The shards of a token store: the names of their files, and those of one source read as one array."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.data.loss_mask import MASK, MaskBits, mask_bytes

#: Suffixes of a shard's files: token ids, and document offsets; a loss mask is beside them where not all are trained.
TOKENS = ".bin"
INDEX = ".idx"

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Shard:
    """A contiguous range of a source's tokens, stored in one file."""

    file: str
    """Name of the token file in `<split>/<source>/`."""
    tokens: int
    documents: int
    first_token: int
    """Tokens of the source in the shards before this one."""


class StoreFile(NamedTuple):
    """A file of a shard."""

    name: str
    """Path relative to the store, with forward slashes."""
    bytes: int
    sha256: str


def shard_files(shard: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a shard entry: tokens, document offsets, and a loss mask if it has one."""
    stem = str(shard["file"]).removesuffix(TOKENS)
    endings = (TOKENS, INDEX, MASK) if "mask_sha256" in shard else (TOKENS, INDEX)
    return [stem + ending for ending in endings]


def files_of(folder: str, shard: Mapping[str, Any], width: int) -> list[StoreFile]:
    """Return the files of a shard entry as `shard_files` does, with their whole lengths and hashes.

    Args:
        folder: `<split>/<source>`.
        shard: The entry, which may stand for a part of the files (`TokenStore.with_shards`).
        width: Bytes of a token.
    """
    tokens = shard.get("file_tokens", shard["tokens"])
    sizes = (tokens * width, 8 * (shard.get("file_documents", shard["documents"]) + 1), mask_bytes(tokens))
    digests = (shard["sha256"], shard["index_sha256"], shard.get("mask_sha256", ""))
    files = zip(shard_files(shard), sizes, digests, strict=False)
    return [StoreFile(f"{folder}/{name}", size, digest) for name, size, digest in files]


def own_tokens(tokens: Tokens, shard: Mapping[str, Any]) -> Tokens:
    """Return the tokens of a file that belong to a shard entry."""
    first = shard.get("skip_tokens", 0)
    return tokens[first : first + shard["tokens"]]


def reference(shard: Mapping[str, Any]) -> str:
    """Return the reference that names a shard: its file, or `FILE:FIRST:END` for a range of its documents."""
    if "file_documents" not in shard:
        return str(shard["file"])
    first = shard["skip_documents"]
    return f"{shard['file']}:{first}:{first + shard['documents']}"


def documents_of(shard: Mapping[str, Any], first: int, end: int) -> str:
    """Return a reference to documents `first` to `end` (exclusive) of a whole shard."""
    whole = (first, end) == (0, shard["documents"])
    return str(shard["file"]) if whole else f"{shard['file']}:{first}:{end}"


class ShardStream:
    """The shards of one source in one split, read as one array. A shard is mapped when it is first read.

    Args:
        part: The source's entry in the manifest.
        map_shard: Maps a shard, given its manifest entry.
        keep: Shards that stay mapped.
    """

    def __init__(
        self, part: dict[str, Any], map_shard: Callable[[dict[str, Any]], Tokens | MaskBits], keep: int
    ) -> None:
        self._part = part
        self._map_shard = map_shard
        self._keep = keep
        self._starts = list(accumulate((shard["tokens"] for shard in part["shards"]), initial=0))
        self._mapped: OrderedDict[int, Tokens | MaskBits] = OrderedDict()

    @cached_property
    def shards(self) -> list[Shard]:
        """All shards, created lazily, since reading tokens does not need them."""
        return [
            Shard(shard["file"], shard["tokens"], shard["documents"], first)
            for shard, first in zip(self._part["shards"], self._starts, strict=False)
        ]

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return tokens [start, start + count), or their bits, (count,)."""
        if start < 0 or count < 0 or start + count > self._starts[-1]:
            raise IndexError(f"tokens [{start}, {start + count}) are not inside [0, {self._starts[-1]})")
        number = min(bisect_right(self._starts, start), len(self._starts) - 1) - 1
        offset = start - self._starts[number]
        part = self._map(number)[offset : offset + count]
        if len(part) == count:
            return part
        parts = [part]
        found = len(part)
        while found < count:
            number += 1
            parts.append(self._map(number)[: count - found])
            found += len(parts[-1])
        return np.concatenate(parts)

    def _map(self, number: int) -> Tokens | MaskBits:
        array = self._mapped.get(number)
        if array is None:
            array = self._map_shard(self._part["shards"][number])
            if self._keep:
                self._mapped[number] = array
                if len(self._mapped) > self._keep:
                    self._mapped.popitem(last=False)
        return array

    def shards_with(self, starts: NDArray[np.int64], count: int) -> list[int]:
        """Return the numbers of the shards that overlap [start, start + count) for any of the starts, (n,)."""
        first = np.searchsorted(self._starts, starts, side="right") - 1
        last = np.searchsorted(self._starts, starts + max(0, count - 1), side="right") - 1
        numbers = {n for low, high in zip(first.tolist(), last.tolist(), strict=True) for n in range(low, high + 1)}
        return sorted(number for number in numbers if number < len(self._starts) - 1)

"""The shards of a token store: the names of their files, and those of one source read as one array."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.data.loss_mask import MASK, MaskBits

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
    first_document: int
    sha256: str
    index_sha256: str
    skip_tokens: int = 0
    """Leading tokens of the file that this store does not use (`TokenStore.with_shards`)."""
    skip_documents: int = 0
    file_tokens: int | None = None
    """Tokens of the whole file, if the shard is a part of it."""
    file_documents: int | None = None
    mask_sha256: str | None = None
    """Hash of the loss mask; None if all tokens are trained."""

    @property
    def index(self) -> str:
        """Name of the file with the document offsets."""
        return index_file(self.file)

    @property
    def index_bytes(self) -> int:
        """Length of the index file in bytes."""
        return ((self.documents if self.file_documents is None else self.file_documents) + 1) * 8


def index_file(file: str) -> str:
    """Return the name of a shard's document index, given the name of its token file."""
    return file.removesuffix(TOKENS) + INDEX


def mask_file(file: str) -> str:
    """Return the name of a shard's loss mask, given the name of its token file."""
    return file.removesuffix(TOKENS) + MASK


def shard_files(shard: Mapping[str, Any]) -> list[str]:
    """Return the names of the files of a shard entry."""
    file = str(shard["file"])
    return [file, index_file(file), *([mask_file(file)] if "mask_sha256" in shard else [])]


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
        documents = accumulate((shard["documents"] for shard in self._part["shards"]), initial=0)
        return [
            Shard(**shard, first_token=token, first_document=document)
            for shard, token, document in zip(self._part["shards"], self._starts, documents, strict=False)
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

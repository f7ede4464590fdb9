"""Loss masks: which tokens of a shard are trained, one bit each, in a third file beside its tokens and its index.

Only shards of conversations have one. In each byte the lowest bit belongs to the first token; bits after the last token
are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: The manifest's entry, for a source in a split, that says what becomes of rows none of whose tokens is trained.
ROWS_WITHOUT_TARGET = "rows_without_target"
LEFT_OUT = "left_out"
#: Suffix of the file.
MASK = ".mask"


def mask_bytes(tokens: int) -> int:
    """Return the length of the mask of so many tokens."""
    return -(-tokens // 8)


class MaskBits:
    """The mask of a shard, or of the part of a file that belongs to a shard entry (`Shard.skip_tokens`).

    Args:
        content: The bytes of the file, uint8 (n,).
        shard: The shard's entry in the manifest.
    """

    def __init__(self, content: NDArray[np.uint8], shard: Mapping[str, Any]) -> None:
        self._content = content
        self._first = shard.get("skip_tokens", 0)
        self._tokens = shard["tokens"]

    def __len__(self) -> int:
        return int(self._tokens)

    def __getitem__(self, part: slice) -> NDArray[np.bool_]:
        """Return the bits of some tokens; only their bytes are read."""
        start, end, _ = part.indices(self._tokens)
        end = max(start, end) + self._first
        start = start + self._first
        bits = np.unpackbits(self._content[start // 8 : mask_bytes(end)], bitorder="little")
        return bits[start % 8 : start % 8 + end - start].astype(np.bool_)


class MaskPacker:
    """Packs bits that arrive in parts of any length into whole bytes."""

    def __init__(self) -> None:
        self._rest = np.empty(0, dtype=np.bool_)

    def pack(self, bits: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Return the bytes that are complete with these bits."""
        bits = np.concatenate([self._rest, bits])
        whole = len(bits) - len(bits) % 8
        self._rest = bits[whole:]
        return np.packbits(bits[:whole], bitorder="little")

    def end(self) -> NDArray[np.uint8]:
        """Return the last byte, if bits are left."""
        return np.packbits(self._rest, bitorder="little")

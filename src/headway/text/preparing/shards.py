"""Writing the shards of a unit: token ids and document starts, whole or absent."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from headway.core.files.atomic import begin_flush, sync_folder
from headway.core.process.faults import fault_point
from headway.data.loss_mask import MASK, MaskPacker
from headway.data.shards import INDEX, TOKENS

# Number of bytes after which a flush to disk begins, while the next bytes are produced.
_FLUSHED_BYTES = 2**20


class ShardWriter:
    """The files of one shard, written piece by piece under temporary names.

    Args:
        folder: `<split>/<source>` of the store that is being built; created with the first token.
        name: Name of the files, without the suffix.

    Attributes:
        tokens: Ids written so far.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._files: dict[str, _HashedFile] = {}
        self._packer = MaskPacker()
        self.tokens = self._documents = 0

    def write(self, ids: NDArray[Any], ends: NDArray[np.int64], trained: NDArray[np.bool_] | None = None) -> None:
        """Add ids.

        Args:
            ids: Token ids; the last document may continue in the next call.
            ends: Where documents end: the place after their last id.
            trained: The loss mask; all calls give one, or none does.

        Raises:
            OSError: The files cannot be written, for example because the disk is full.
        """
        if not self._files:
            fault_point("data.shard")
            self._folder.mkdir(parents=True, exist_ok=True)
            endings = (TOKENS, INDEX) if trained is None else (TOKENS, INDEX, MASK)
            self._files = {ending: _HashedFile(self._folder / f".{self._name}{ending}") for ending in endings}
            self._files[INDEX].write(np.zeros(1, dtype="<u8"))
        self._files[INDEX].write((self.tokens + ends).astype("<u8"))
        self._files[TOKENS].write(ids)
        if trained is not None:
            self._files[MASK].write(self._packer.pack(trained))
        self._documents += len(ends)
        self.tokens += len(ids)

    def finish(self) -> dict[str, Any] | None:
        """Flush the files to disk and give them their final names.

        Returns:
            The shard's entry in the manifest; None if the shard has no documents.

        Raises:
            OSError: The files cannot be written, for example because the disk is full.
        """
        if not self._files:
            return None
        if MASK in self._files:
            self._files[MASK].write(self._packer.end())
        hashes = {ending: file.close() for ending, file in self._files.items()}
        for ending in self._files:
            (self._folder / f".{self._name}{ending}").replace(self._folder / f"{self._name}{ending}")
        sync_folder(self._folder)
        return {
            "file": self._name + TOKENS,
            "tokens": self.tokens,
            "documents": self._documents,
            "sha256": hashes[TOKENS],
            "index_sha256": hashes[INDEX],
            **({"mask_sha256": hashes[MASK]} if MASK in hashes else {}),
        }

    def abandon(self) -> None:
        """Close the files and remove them."""
        for ending, file in self._files.items():
            file.discard()
            (self._folder / f".{self._name}{ending}").unlink(missing_ok=True)


class _HashedFile:
    """A new file that computes its SHA-256 as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._hash = hashlib.sha256()
        self._size = self._flushed = 0

    def write(self, values: NDArray[Any]) -> None:
        """Append an array's bytes."""
        data = np.ascontiguousarray(values).view(np.uint8).data
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)
        if self._size - self._flushed >= _FLUSHED_BYTES:
            begin_flush(self._file.fileno(), self._flushed, self._size - self._flushed)
            self._flushed = self._size

    def close(self) -> str:
        """Flush the file to disk, close it, and return its SHA-256 in hexadecimal."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Close the file without checking its content."""
        with suppress(OSError):  # the disk may have no room for the buffered bytes
            self._file.close()

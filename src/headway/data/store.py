"""Reading a token store: a folder of token shards with a manifest. The format is described in docs/data-format.md."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.files import fingerprint, sha256_file

FORMAT = "headway-token-store"
VERSION = 1
MANIFEST = "manifest.json"
INDEX = "documents.idx"
PREPARE = "headway data prepare CONFIG"


class TokenStore:
    """A prepared corpus, memory-mapped: opening it reads the manifest only.

    Attributes:
        path: Folder of the store.
        manifest: The parsed `manifest.json`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._streams: dict[tuple[str, str], _Stream] = {}

    @classmethod
    def open(cls, path: Path | str, *, check: bool = True) -> TokenStore:
        """Open the store in folder `path`.

        Args:
            path: Folder of the store.
            check: Look now whether every shard is there in its full length. `verify` also checks every hash.

        Raises:
            DataError: there is no store, its manifest is unreadable, its format is another one, or a shard is missing
                or has another length than the manifest says.
        """
        path = Path(path)
        store = cls(path, read_manifest(path))
        if check:
            for split, source in store._parts():
                store._stream(split, source)
        return store

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the manifest's canonical JSON, and so of everything in the store."""
        return fingerprint(self.manifest)

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hex SHA-256 of `tokenizer.json`."""
        return str(self.manifest["tokenizer"]["fingerprint"])

    @property
    def vocab_size(self) -> int:
        """Number of token ids: every id is below it."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def end_of_text_id(self) -> int:
        """The token that ends every document."""
        return int(self.manifest["tokenizer"]["end_of_text_id"])

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with `tokenizer.json`; transformers' AutoTokenizer loads it."""
        return self.path / "tokenizer"

    @property
    def splits(self) -> list[str]:
        """Splits that hold tokens: "train", and "validation" when there is one."""
        return [split for split in self.manifest["splits"] if self.sources(split)]

    def sources(self, split: str) -> list[str]:
        """Names of the sources that have tokens in a split, in the order of the config."""
        parts = self.manifest["splits"].get(split, {})
        names = [source["name"] for source in self.manifest["sources"]]
        return [name for name in names if parts.get(name, {}).get("tokens")]

    def tokens(self, split: str, source: str | None = None) -> int:
        """Number of tokens of one source in a split, or of all."""
        names = self.sources(split) if source is None else [source]
        return sum(int(self._part(split, name)["tokens"]) for name in names)

    def documents(self, split: str, source: str) -> NDArray[np.uint64]:
        """Where documents start in the source's tokens, and the end of the last: uint64 (documents + 1,)."""
        file = self.path / split / source / INDEX
        count = int(self._part(split, source)["documents"]) + 1
        try:
            return np.memmap(file, dtype="<u8", mode="r", shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read a document index: {error}", where=str(file), fix=PREPARE) from None

    def read(self, split: str, source: str, start: int, count: int) -> NDArray[np.integer[Any]]:
        """Tokens [start, start + count) of a source: uint16 or uint32 (count,), across shards.

        Raises:
            IndexError: the range is not inside the source.
        """
        return self._stream(split, source).read(start, count)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards and document indexes."""
        return sum(size or 0 for _, size, _ in self._files())

    def verify(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Check every file against the manifest: presence, length, SHA-256.

        Args:
            progress: Called with the bytes of each shard or index that was checked.

        Returns:
            One line for each problem, naming the file; none when the store is sound.
        """
        problems = []
        for name, size, digest in self._files():
            problem = _problem(self.path / name, size, digest)
            if problem:
                problems.append(f"{name}: {problem}")
            if progress:
                progress(size or 0)
        return problems

    def _files(self) -> list[tuple[str, int | None, str]]:
        """Name, length (of shards and indexes) and SHA-256 of every file."""
        files: list[tuple[str, int | None, str]] = [("tokenizer/tokenizer.json", None, self.tokenizer_fingerprint)]
        width = np.dtype(self.manifest["dtype"]).itemsize
        for split, source in self._parts():
            part = self._part(split, source)
            folder = f"{split}/{source}"
            files += [(f"{folder}/{s['file']}", s["tokens"] * width, s["sha256"]) for s in part["shards"]]
            files.append((f"{folder}/{INDEX}", (part["documents"] + 1) * 8, part["index_sha256"]))
        return files

    def _parts(self) -> list[tuple[str, str]]:
        return [(split, source) for split in self.splits for source in self.sources(split)]

    def _part(self, split: str, source: str) -> dict[str, Any]:
        try:
            part: dict[str, Any] = self.manifest["splits"][split][source]
        except KeyError:
            known = ", ".join(f"{split}/{source}" for split, source in self._parts())
            raise DataError(
                f"the store has no source '{source}' in split '{split}'",
                where=str(self.path),
                fix=f"it has: {known}",
            ) from None
        return part

    def _stream(self, split: str, source: str) -> _Stream:
        key = (split, source)
        if key not in self._streams:
            self._streams[key] = _Stream(self.path / split / source, self._part(split, source), self.manifest["dtype"])
        return self._streams[key]


class _Stream:
    """The shards of one source in one split, read as one array."""

    def __init__(self, folder: Path, part: dict[str, Any], dtype: str) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        self._shards: list[NDArray[np.integer[Any]]] = []
        for shard in part["shards"]:
            file = folder / shard["file"]
            problem = _problem(file, shard["tokens"] * kind.itemsize, None)
            if problem:
                raise DataError(f"a shard of the token store is damaged: {problem}", where=str(file), fix=PREPARE)
            self._shards.append(np.memmap(file, dtype=kind, mode="r", shape=(shard["tokens"],)))
        self._starts = list(accumulate((len(shard) for shard in self._shards), initial=0))

    def read(self, start: int, count: int) -> NDArray[np.integer[Any]]:
        if start < 0 or count < 0 or start + count > self._starts[-1]:
            raise IndexError(f"tokens [{start}, {start + count}) are not inside [0, {self._starts[-1]})")
        number = min(bisect_right(self._starts, start), len(self._shards)) - 1
        offset = start - self._starts[number]
        parts = [self._shards[number][offset : offset + count]]
        found = len(parts[0])
        while found < count:
            number += 1
            parts.append(self._shards[number][: count - found])
            found += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _problem(file: Path, size: int | None, digest: str | None) -> str | None:
    """What is wrong with a file, if anything; a length or hash of None is not looked at."""
    try:
        actual = file.stat().st_size
        if size is not None and actual != size:
            return f"{actual} bytes long, not {size}"
        if digest is not None and sha256_file(file) != digest:
            return "its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the store in folder `path`.

    Raises:
        DataError: it is missing, no JSON, or of another format or version.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        kind, version = manifest["format"], manifest["version"]
    except (FileNotFoundError, NotADirectoryError):
        raise DataError("there is no token store here", where=str(path), fix=PREPARE) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the manifest of the token store cannot be read: {error!r}"
        raise DataError(what, where=str(file), fix=PREPARE) from None
    if (kind, version) != (FORMAT, VERSION):
        raise DataError(
            f"this is a store of format {kind} version {version}; this Headway reads {FORMAT} version {VERSION}",
            where=str(file),
            fix=f"{PREPARE} --force",
        )
    return dict(manifest)

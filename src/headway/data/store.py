"""Reading a token store: a folder of token shards with a manifest. The format is described in docs/data-format.md."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headway.core.arrays import Bools, Ints, UInt64s
from headway.core.errors import DataError
from headway.core.files.foreign import LISTING_BYTES, parse_json, read_bytes, read_json
from headway.core.files.hashes import fingerprint, sha256_file
from headway.core.user_command import suggest
from headway.data.first_use import ShardChecker
from headway.data.loss_mask import LEFT_OUT, ROWS_WITHOUT_TARGET, MaskBits, mask_bytes
from headway.data.shards import Shard, ShardStream, StoreFile, Tokens, files_of, own_tokens, shard_files
from headway.data.store_manifest import MANIFEST, read_manifest

#: Record of the inputs: files with hashes, counts, what was skipped and why. The manifest holds its hash.
INPUTS = "inputs.json"
#: Malformed documents that were skipped; written only when there are some.
SKIPPED = "skipped.jsonl"
#: Default output file of `headway data report`.
REPORT = "report.html"
#: Folder of packing plans. Missing plans are computed again.
PACKING = "packing"
# Tokens checked per step of `verify`.
_BLOCK = 2**20
# Shards that one source keeps mapped. Each holds a file descriptor; the default limit is 1,024 per process.
_MAPPED = 128


class TokenStore:
    """A prepared corpus, memory-mapped. Opening it reads only the manifest.

    Attributes:
        path: Folder of the store.
        manifest: The parsed `manifest.json`.
        at_hand: Whether tokens are on this machine. If not, `want` fetches those of many rows at once.
        is_part: Whether the store is a selection of another store's shards (`with_shards`).
        checker: Verifies shards when they are first opened (`check_on_first_use`).
    """

    at_hand = True
    is_part = False
    checker: ShardChecker | None = None

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._streams: dict[tuple[str, str], ShardStream] = {}
        self._masks: dict[tuple[str, str], ShardStream | None] = {}

    @classmethod
    def open(cls, path: Path | str, *, check: bool = True) -> TokenStore:
        """Open the store in folder `path`.

        Args:
            path: Folder of the store.
            check: Check now that every shard exists with its full length. `verify` also checks every hash.

        Raises:
            DataError: there is no store, its manifest is unreadable, its format is not supported, or a shard is missing
                or its length differs from the manifest.
        """
        path = Path(path)
        store = cls(path, read_manifest(path))
        if check:
            store.check()
        return store

    def check_on_first_use(self) -> ShardChecker:
        """Verify every shard in the background when it is first opened; `read` raises what the check finds."""
        self.checker = ShardChecker(self.path, self.dtype, self.vocab_size)
        return self.checker

    def _note(self, file: StoreFile, *, has_ids: bool) -> None:
        """Pass a file that was just opened to the checker, if there is one."""
        if self.checker is not None:
            self.checker.opened(self.path / file.name, file.bytes, file.sha256, has_ids=has_ids)

    def with_manifest(self, manifest: dict[str, Any]) -> Self:
        """Return this store as another manifest describes it, for example that of an earlier preparation."""
        store = copy(self)
        store.manifest = manifest
        store._streams = {}
        store._masks = {}
        return store

    def with_shards(self, split: str, files: Mapping[str, Sequence[str]]) -> Self:
        """Return a store of selected shards, in the given order.

        Args:
            split: The only split of the new store.
            files: References to shards (`reference`), by source.

        Raises:
            DataError: a shard is not in the store.
        """
        part = {}
        for source, names in files.items():
            numbers = {shard["file"]: number for number, shard in enumerate(self.shard_entries(split, source))}
            if missing := [name for name in names if name.split(":")[0] not in numbers]:
                raise DataError(
                    f"the store no longer has all shards of source '{source}': {missing[0]} is missing",
                    where=str(self.path),
                    fix="restore the token store",
                )
            shards = [self._referred(split, source, numbers[name.split(":")[0]], name) for name in names]
            totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents")}
            part[source] = {**self.manifest["splits"][split][source], **totals, "shards": shards}
        store = self.with_manifest({**self.manifest, "splits": {split: part}})
        store.is_part = True
        return store

    def _referred(self, split: str, source: str, number: int, name: str) -> dict[str, Any]:
        """Return the manifest entry for a reference to a shard or to a range of its documents."""
        entry: dict[str, Any] = self.shard_entries(split, source)[number]
        documents = name.split(":")[1:]
        if not documents:
            return entry
        first, last = map(int, documents)
        if not 0 <= first < last <= entry["documents"]:
            what = f"documents {first:,} to {last:,} do not exist in a shard of {entry['documents']:,}"
            raise _damaged(self.path / split / source / entry["file"], what)
        starts = self.shard_documents(split, source, number)
        begin, end = (int(starts[place] - starts[0]) for place in (first, last))
        skipped = {"skip_tokens": begin, "skip_documents": first}
        whole = {"file_tokens": entry["tokens"], "file_documents": entry["documents"]}
        return {**entry, "tokens": end - begin, "documents": last - first, **skipped, **whole}

    def shard_entries(self, split: str, source: str) -> list[dict[str, Any]]:
        """Return the manifest entries of a source's shards, in order; empty if the split lacks the source."""
        entries: list[dict[str, Any]] = self.manifest["splits"].get(split, {}).get(source, {}).get("shards", [])
        return entries

    def check(self) -> None:
        """Check that every shard exists with its full length.

        Raises:
            DataError: a shard is missing or its length is wrong.
        """
        width = self.dtype.itemsize
        for split, source in self._parts():
            folder = self.path / split / source
            sizes = _sizes(folder)  # one directory scan: a stat call for each of ten thousand files is slow
            for shard in self._part(split, source)["shards"]:
                # For so many, `files_of` takes too long.
                tokens = shard.get("file_tokens", shard["tokens"])
                wanted = {shard["file"]: tokens * width}
                if "mask_sha256" in shard:
                    wanted[shard_files(shard)[2]] = mask_bytes(tokens)
                for name, size in wanted.items():
                    if sizes.get(name) != size:
                        problem = file_problem(folder / name, size, None) or "it changed while it was checked"
                        raise _damaged(folder / name, problem)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the manifest's canonical JSON, which identifies everything in the store."""
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
    def begin_of_text(self) -> dict[str, int]:
        """Tokens that begin every document, with their ids; may be empty."""
        tokenizer = self.manifest["tokenizer"]
        return dict(zip(tokenizer.get("begin_of_text", []), tokenizer.get("begin_of_text_ids", []), strict=True))

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with `tokenizer.json`; transformers' AutoTokenizer loads it."""
        return self.path / "tokenizer"

    @property
    def splits(self) -> list[str]:
        """Splits that hold tokens: "train", and "validation" when there is one."""
        return [split for split in self.manifest["splits"] if self.sources(split)]

    def sources(self, split: str) -> list[str]:
        """Return the names of the sources with tokens in a split, in config order."""
        parts = self.manifest["splits"].get(split, {})
        names = [source["name"] for source in self.manifest["sources"]]
        return [name for name in names if parts.get(name, {}).get("tokens")]

    def tokens(self, split: str, source: str | None = None) -> int:
        """Return the number of tokens of one source in a split, or of all its sources."""
        names = self.sources(split) if source is None else [source]
        return sum(int(self._part(split, name)["tokens"]) for name in names)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of token ids on disk: little-endian uint16 or uint32."""
        kind: np.dtype[Any] = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        return kind

    def inputs(self) -> dict[str, Any]:
        """Return the record of the inputs: files, counts, cleaning, duplicates. Empty for an imported store.

        Raises:
            DataError: the record is damaged.
        """
        if "inputs_sha256" not in self.manifest:
            return {}
        content = self._content(INPUTS, None, self.manifest["inputs_sha256"])
        try:
            found = dict(parse_json(content))
            sources = found.get("sources", [])
            if not isinstance(sources, list) or not all(isinstance(s, dict) and "name" in s for s in sources):
                raise ValueError("it has no list of sources")
            return found
        except (ValueError, TypeError) as error:
            raise _damaged(self.path / INPUTS, str(error)) from None

    def shards(self, split: str, source: str) -> list[Shard]:
        """Return the shards of a source in a split, in order."""
        return self._stream(split, source).shards

    def documents(self, split: str, source: str) -> UInt64s:
        """Return the document offsets in the source's tokens, with the end of the last: uint64 (documents + 1,)."""
        parts = [self.shard_documents(split, source, n)[:-1] for n in range(len(self.shards(split, source)))]
        return np.concatenate([*parts, np.array([self.tokens(split, source)], dtype="<u8")])

    def shard_documents(self, split: str, source: str, number: int) -> UInt64s:
        """Return the document offsets of shard `number`, relative to the source: uint64 (documents of the shard + 1,).

        Raises:
            DataError: the index is missing or does not match its shard.
        """
        shard = self.shard_entries(split, source)[number]
        _, index, *_ = self._files_of(split, source, shard)
        starts = np.frombuffer(self._content(*index), dtype="<u8")
        tokens = shard.get("file_tokens", shard["tokens"])
        # Only `verify` compares hashes, so check here that damage does not yield documents of negative length.
        rises = len(starts) > 0 and starts[0] == 0 and not (starts[1:] < starts[:-1]).any()
        if len(starts) != index.bytes // 8 or not rises or starts[-1] != tokens:
            raise _damaged(self.path / index.name, "the index does not match its shard")
        first = shard.get("skip_documents", 0)
        own = starts[first : first + shard["documents"] + 1]
        before = self.shards(split, source)[number].first_token
        return np.asarray(own + np.uint64(before) - np.uint64(shard.get("skip_tokens", 0)), dtype=np.uint64)

    def read(self, split: str, source: str, start: int, count: int) -> NDArray[np.integer[Any]]:
        """Return tokens [start, start + count) of a source: uint16 or uint32 (count,), across shards.

        Raises:
            IndexError: the range is not inside the source.
            DataError: a shard is missing, its length differs from the manifest, or a shard opened earlier turned out to
                be damaged.
        """
        if self.checker is not None:
            self.checker.check_verified()
        return self._stream(split, source).read(start, count)

    def has_mask(self, split: str, source: str) -> bool:
        """Return whether a source has a loss mask: its shards have one, or none has."""
        return "mask_sha256" in next(iter(self.shard_entries(split, source)), {})

    def leaves_out_rows(self, split: str, source: str) -> bool:
        """Return whether rows of a source without a target, by its loss mask, are no rows of a run."""
        part = self.manifest["splits"].get(split, {}).get(source, {})
        return self.has_mask(split, source) and part.get(ROWS_WITHOUT_TARGET) == LEFT_OUT

    def read_mask(self, split: str, source: str, start: int, count: int) -> Bools | None:
        """Return for tokens [start, start + count) of a source whether they are trained; None if all of it are.

        Raises:
            IndexError, DataError: as in `read`.
        """
        key = (split, source)
        if key not in self._masks:
            self._masks[key] = self._make_mask_stream(split, source) if self.has_mask(split, source) else None
        stream = self._masks[key]
        return None if stream is None else stream.read(start, count).astype(np.bool_, copy=False)

    def want(self, split: str, source: str, starts: Ints, count: int, index: bool = False) -> None:
        """Announce reads of tokens [start, start + count) of a source, so that a remote store can prefetch them.

        Args:
            split: The split.
            source: Name of the source.
            starts: First tokens of the reads, int64 (n,).
            count: Tokens of each read.
            index: Whether the document offsets will be read too.
        """

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards and document indexes."""
        return sum(size or 0 for _, size, _ in self._files())

    def verify(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Check every file against the manifest (presence, length, SHA-256), and its counts against the files.

        Args:
            progress: Called with the bytes of each shard or index after its check.

        Returns:
            One line per problem, which names the file; empty when the store is sound.
        """
        problems = []
        for name, size, digest in self._files():
            problem = file_problem(self.path / name, size, digest)
            if problem:
                problems.append(f"{name}: {problem}")
            if progress:
                progress(size or 0)
        return (problems or self._problems_of_counts()) + self._problems_of_settings()

    def _problems_of_counts(self) -> list[str]:
        """Report counts of the manifest that the files contradict, and ids outside the vocabulary."""
        problems = []
        for source in self.manifest["sources"]:
            for key in ("documents", "tokens"):
                parts = (parts.get(source["name"], {}).get(key, 0) for parts in self.manifest["splits"].values())
                if source[key] != (total := sum(parts)):
                    what = f"{key} of source '{source['name']}' are {source[key]:,}, but its splits have {total:,}"
                    problems.append(f"{MANIFEST}: {what}")
        for split, source in self._parts():
            numbers = range(len(self.shards(split, source)))
            found = (self._problem_of_shard(split, source, number) for number in numbers)
            problems += [problem for problem in found if problem]
        return problems

    def _problem_of_shard(self, split: str, source: str, number: int) -> str | None:
        entry = self.shard_entries(split, source)[number]
        file, index, *_ = self._files_of(split, source, entry)
        try:
            starts = self.shard_documents(split, source, number)
        except DataError:
            return f"{index.name}: its documents do not cover the shard contiguously"
        if not (starts[1:] > starts[:-1]).all():
            return f"{index.name}: some of its documents have no tokens"
        tokens = own_tokens(self._map(file, self.dtype), entry)
        largest = max(int(tokens[start : start + _BLOCK].max()) for start in range(0, len(tokens), _BLOCK))
        if largest >= self.vocab_size:
            return f"{file.name}: it has the id {largest:,}, but the vocabulary ends at {self.vocab_size - 1:,}"
        ends = (starts[1:] - starts[0]).astype(np.int64)
        unended = int(np.count_nonzero(tokens[ends - 1] != self.end_of_text_id))
        return f"{file.name}: {unended:,} of its documents do not end with the end-of-text token" if unended else None

    def _problems_of_settings(self) -> list[str]:
        """Report problems of the tokenizer settings, which have no hash and may be missing from copies of a store."""
        name = "tokenizer/tokenizer_config.json"
        if not (self.path / name).exists():
            return []
        try:
            said = read_json(self.path / name)["eos_token"]
        except (OSError, ValueError, KeyError, TypeError):
            return [f"{name}: unreadable, or not the settings of a tokenizer"]
        end = said.get("content") if isinstance(said, dict) else said
        wanted = self.manifest["tokenizer"]["end_of_text"]
        return [] if end == wanted else [f"{name}: its eos_token is {end!r}, the store's is {wanted!r}"]

    def problems_outside_shards(self) -> list[str]:
        """Check only the small files, without the shards: the tokenizer and the record of the inputs."""
        found = ((name, file_problem(self.path / name, None, digest)) for name, digest in self._small_files())
        return [f"{name}: {problem}" for name, problem in found if problem]

    def _small_files(self) -> list[tuple[str, str]]:
        """Return name and SHA-256 of every file that is not a shard or an index."""
        inputs = [(INPUTS, str(self.manifest["inputs_sha256"]))] if "inputs_sha256" in self.manifest else []
        return [("tokenizer/tokenizer.json", self.tokenizer_fingerprint), *inputs]

    def _files(self) -> list[tuple[str, int | None, str]]:
        """Return name, length (None for small files) and SHA-256 of every file."""
        return [*((name, None, digest) for name, digest in self._small_files()), *self._shard_files()]

    def _shard_files(self) -> list[StoreFile]:
        """Return the files of all shards."""
        return [
            file
            for split, source in self._parts()
            for shard in self.shard_entries(split, source)
            for file in self._files_of(split, source, shard)
        ]

    def _files_of(self, split: str, source: str, shard: Mapping[str, Any]) -> list[StoreFile]:
        return files_of(f"{split}/{source}", shard, self.dtype.itemsize)

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

    def _stream(self, split: str, source: str) -> ShardStream:
        key = (split, source)
        if key not in self._streams:
            self._streams[key] = self._make_stream(split, source)
        return self._streams[key]

    def _make_stream(self, split: str, source: str) -> ShardStream:
        dtype = self.dtype

        def map_shard(shard: dict[str, Any]) -> Tokens:
            file = self._files_of(split, source, shard)[0]
            tokens = own_tokens(self._map(file, dtype), shard)
            self._note(file, has_ids=True)
            return tokens

        return ShardStream(self._part(split, source), map_shard, _MAPPED if self.at_hand else 0)

    def _make_mask_stream(self, split: str, source: str) -> ShardStream:
        def map_mask(shard: dict[str, Any]) -> Tokens | MaskBits:
            file = self._files_of(split, source, shard)[2]
            bits = MaskBits(self._map(file, np.dtype(np.uint8)), shard)
            self._note(file, has_ids=False)
            return bits

        return ShardStream(self._part(split, source), map_mask, _MAPPED if self.at_hand else 0)

    def _map(self, part: StoreFile, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Map a whole file into memory."""
        file = self.path / part.name
        problem = file_problem(file, part.bytes, None)
        if problem:
            raise _damaged(file, problem)
        # Wrap the mapping in a plain array: slicing `np.memmap` itself costs microseconds each time.
        return np.asarray(np.memmap(file, dtype=dtype, mode="r", shape=(part.bytes // dtype.itemsize,)))

    def _content(self, name: str, size: int | None, digest: str) -> bytes:
        """Return the content of a file that is not mapped. If the length is known, only `verify` checks the hash."""
        file = self.path / name
        problem = file_problem(file, size, digest if size is None else None)
        if problem:
            raise _damaged(file, problem)
        return read_bytes(file, max(LISTING_BYTES, size or 0))


def _damaged(file: Path, problem: str) -> DataError:
    return DataError(f"the token store is damaged: {problem}", where=str(file), fix=suggest("data prepare"))


def _sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file in a folder; empty if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}
    except OSError:
        return {}


def file_problem(file: Path, size: int | None, digest: str | None) -> str | None:
    """Return what is wrong with a file, if anything; a length or hash of None is not checked."""
    try:
        found = file.stat()
        actual = found.st_size
        if not stat.S_ISREG(found.st_mode):
            return "not a regular file"
        if size is not None and actual != size:
            return f"{actual} bytes long, not {size}"
        if digest is not None and sha256_file(file, LISTING_BYTES if size is None else None) != digest:
            return "its SHA-256 is not the manifest's"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return None

"""A token store behind a URL. Its manifest and tokenizer are copied at the start, its shards when rows need them.

Rows come in the same order as from a local store, since the order depends only on the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.config.sections.data import DataConfig
from headway.core.console import notice, warning
from headway.core.coordination.launched import workers_of_this_machine, world_size_from_environment
from headway.core.errors import ConfigError, DataError, explaining_os_errors
from headway.core.files.atomic import atomic_write, write_json
from headway.core.files.foreign import LISTING_BYTES, read_bytes, read_json
from headway.core.files.hashes import fingerprint, sha256_bytes
from headway.core.format import format_bytes
from headway.core.process.faults import fault_point
from headway.data.remote_cache import KEEPING, Copies, WrongContentError, locked
from headway.data.shards import StoreFile
from headway.data.storage import MissingError, UnreachableError
from headway.data.store import TokenStore, file_problem
from headway.data.store_manifest import MANIFEST, parse_manifest
from headway.data.tokenizing.tokenizer import Tokenizer

_SOURCE = f"{KEEPING}/source.json"
_TOKENIZER = "tokenizer/tokenizer.json"
_REQUESTS = 16

T = TypeVar("T")


def open_store(
    data: DataConfig, *, check: bool = True, processes: int | None = None, patience_seconds: float | None = None
) -> TokenStore:
    """Open the store of a config, on this machine or behind `data.remote`.

    Args:
        data: Config section with `store`, `remote`, `cache_bytes`.
        check: Check that every shard exists with its full length; for a remote store by a listing.
        processes: Processes of this machine that will read a remote store; by default, as many as the launcher started.
        patience_seconds: Seconds for which a download is retried; see `remote_cache.Copies`.

    Raises:
        ConfigError: `data.store` holds something other than copies, or `data.cache_bytes` is too small.
        DataError: there is no store, it is damaged, or it is not the store of the copies.
    """
    if data.remote is None:
        return TokenStore.open(data.store, check=check)
    count = processes or workers_of_this_machine(world_size_from_environment() or 1)
    copies = Copies(
        data.remote,
        data.remote_options,
        data.store,
        data.cache_bytes,
        processes=count,
        patience_seconds=patience_seconds,
    )
    return RemoteTokenStore.open_copies(copies, count, data.cache_bytes, check=check)


def tokenizer_folder(data: DataConfig) -> Path:
    """Return the folder with the tokenizer of a config's store; copy it from a remote store if it is missing."""
    folder = data.store / "tokenizer"
    if data.remote is not None and not (folder / "tokenizer.json").exists():
        return open_store(data, check=False).tokenizer_folder
    return folder


class RemoteTokenStore(TokenStore):
    """A store whose shards are copied when they are first read.

    Args:
        copies: The copies of the remote store.
        manifest: Its manifest.
        reached: Whether the remote store could be reached.
    """

    at_hand = False

    def __init__(self, copies: Copies, manifest: dict[str, Any], reached: bool = True) -> None:
        super().__init__(copies.folder, manifest)
        self.copies = copies
        self._reached = reached

    @classmethod
    def open_copies(cls, copies: Copies, processes: int, limit: int, *, check: bool = True) -> RemoteTokenStore:
        """Open the remote store of some copies; see `open_store`."""
        _check_same_store(copies.folder)
        try:
            content = _read_small(copies, MANIFEST)
        except UnreachableError as error:
            if not (copies.folder / MANIFEST).exists():
                raise
            warning(f"{error.what}; continuing with the copies in {copies.folder}")
            content = read_bytes(copies.folder / MANIFEST)
            store = cls(copies, parse_manifest(content, str(copies.folder / MANIFEST)), reached=False)
        except MissingError:
            raise DataError(
                "there is no token store there",
                where=copies.storage.url,
                fix="check data.remote; the folder with manifest.json",
            ) from None
        else:
            store = cls(copies, parse_manifest(content, copies.storage.url_of(MANIFEST)))
            store._keep(content)
        store._check_cache_size(processes, limit)
        if check and store._reached:
            store.check()
        return store

    def _keep(self, content: bytes) -> None:
        """Copy manifest and tokenizer to the folder, unless they are there."""
        folder = self.path
        with (
            explaining_os_errors(
                DataError,
                "copies of the remote store cannot be kept",
                folder,
                "free space there, or set data.store to a folder that can be written",
            ),
            locked(folder / KEEPING / "lock"),
        ):
            if (folder / _SOURCE).exists():
                self._check_change(read_json(folder / _SOURCE)["fingerprint"])
            if (folder / MANIFEST).exists():
                return
            # The mark of a folder for copies comes first. The manifest comes last: it shows that the rest is there.
            write_json(folder / _SOURCE, {"url": self.copies.storage.url, "fingerprint": self.fingerprint})
            self._keep_tokenizer()
            fault_point("remote.keep")
            with atomic_write(folder / MANIFEST) as file:
                file.write(content)
        notice(f"copies of {self.copies.storage.url} are kept in {folder}")

    def _keep_tokenizer(self) -> None:
        content = _read_small(self.copies, _TOKENIZER)
        where = self.copies.storage.url_of(_TOKENIZER)
        if sha256_bytes(content) != self.tokenizer_fingerprint:
            raise _wrong(where, "its SHA-256 is not the manifest's")
        tokenizer = Tokenizer(content, where, self.manifest["tokenizer"]["end_of_text"])
        tokenizer.save(self.tokenizer_folder, begin=self.begin_of_text)

    def _check_change(self, before: str) -> None:
        if before != self.fingerprint:
            raise DataError(
                f"the remote store has changed: its fingerprint is {self.fingerprint[:12]}, that of the copies in"
                f" {self.path} is {before[:12]}",
                where=self.copies.storage.url,
                fix=f"restore the remote store; or set another data.store to use the new data in a new run, or in this"
                f" run with --accept-changes (or remove {self.path} if no run needs it)",
            )

    def _check_cache_size(self, processes: int, limit: int) -> None:
        """Check that the cache can hold the shards that processes use at a time.

        A row may cross from one shard into the next, so a process needs two shards of a split. It needs two of each
        split, since training rows are prefetched while an evaluation reads its own.
        """
        largest: dict[str, int] = {}
        for part in self._shard_files():
            split = part.name.split("/")[0]
            largest[split] = max(largest.get(split, 0), part.bytes)
        needed = 2 * sum(largest.values()) * processes
        if limit < needed:
            sizes = ", ".join(f"{format_bytes(size)} of {split}" for split, size in largest.items())
            raise ConfigError(
                f"copies of a remote store need room for two of the largest shards of each split ({sizes})"
                f" for each of {processes} processes",
                where="data.cache_bytes",
                fix=f"data.cache_bytes={needed}, or more: best the {format_bytes(self.size_bytes)} of the whole store",
            )

    def check(self) -> None:
        """Check that the remote store has every file with its full length, without downloads.

        This takes one listing, or a request per file on the web, which has no listings.

        Raises:
            DataError: a file is missing or its length is wrong, or the store cannot be reached.
        """
        parts = self._shard_files()
        if self.copies.storage.web:
            missing = [part for part in parts if not self.copies.has(part)]
            with ThreadPoolExecutor(_REQUESTS) as pool:
                sizes = dict(zip((part.name for part in missing), pool.map(self._size, missing), strict=True))
        else:
            missing = parts
            _, files = self.copies.storage.find()
            sizes = {file.name: file.bytes for file in files}
        for part in missing:
            size = sizes.get(part.name)
            if size != part.bytes:
                problem = "missing" if size is None else f"{size} bytes long, not {part.bytes}"
                raise _wrong(self.copies.storage.url_of(part.name), problem)

    def _size(self, part: StoreFile) -> int | None:
        found = self.copies.storage.stat(part.name)
        return None if found is None else found.bytes

    def want(self, split: str, source: str, starts: NDArray[np.int64], count: int, index: bool = False) -> None:
        """Download the shards with these tokens in parallel; with `index`, their indexes too."""
        shards = self._part(split, source)["shards"]
        numbers = self._stream(split, source).shards_with(starts, count)
        found = [self._files_of(split, source, shards[number]) for number in numbers]
        parts = [tokens for tokens, *_ in found]
        parts += [mask for _, _, *masks in found for mask in masks]
        if index:
            parts += [offsets for _, offsets, *_ in found]
        self._explain_changes(lambda: self.copies.bring(parts))

    def documents(self, split: str, source: str) -> NDArray[np.uint64]:
        """Return the document offsets of a source; the indexes are downloaded in parallel."""
        parts = [self._files_of(split, source, shard)[1] for shard in self.shard_entries(split, source)]
        self._explain_changes(lambda: self.copies.bring(parts))
        return super().documents(split, source)

    def verify(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Check every file against the manifest: the copy if there is one, else the remote file."""
        problems = []
        for name, size, digest in self._files():
            if (self.path / name).exists():
                problem = file_problem(self.path / name, size, digest)
            else:
                problem = self._remote_problem(name, size, digest)
            if problem:
                problems.append(f"{name}: {problem}")
            if progress:
                progress(size or 0)
        return problems

    def _remote_problem(self, name: str, size: int | None, digest: str) -> str | None:
        try:
            known = self.copies.storage.describe(name).bytes
            if size is not None and known != size:
                return f"{known} bytes long, not {size}"
            found = self.copies.storage.stream_to(name, known, take=lambda _: None)
        except DataError as error:
            return error.what
        return None if found == digest else "its SHA-256 is not the manifest's"

    def _content(self, name: str, size: int | None, digest: str) -> bytes:
        if size is not None:
            return self._explain_changes(lambda: self.copies.read(StoreFile(name, size, digest)))
        if file_problem(self.path / name, None, digest) is None:
            return read_bytes(self.path / name)
        content = _read_small(self.copies, name)
        if sha256_bytes(content) != digest:
            raise _wrong(self.copies.storage.url_of(name), "its SHA-256 is not the manifest's")
        with atomic_write(self.path / name) as file:
            file.write(content)
        return content

    def _map(self, part: StoreFile, dtype: np.dtype[Any]) -> NDArray[Any]:
        return self._explain_changes(lambda: self.copies.map(part, dtype))

    def _explain_changes(self, work: Callable[[], T]) -> T:
        """Call `work`; if a file is missing or wrong because the store has changed, raise an error that says so."""
        try:
            return work()
        except (MissingError, WrongContentError) as error:
            try:
                now = fingerprint(parse_manifest(_read_small(self.copies, MANIFEST), self.copies.storage.url))
            except MissingError:
                raise DataError(
                    "the remote store is gone", where=self.copies.storage.url, fix="restore it, then resume the run"
                ) from error
            if now != self.fingerprint:
                raise DataError(
                    f"the remote store has changed during the run: its fingerprint is {now[:12]}, it was"
                    f" {self.fingerprint[:12]}",
                    where=self.copies.storage.url,
                    fix="restore it, then resume the run; or start a new run with data.store in another folder",
                ) from error
            raise


def _read_small(copies: Copies, name: str) -> bytes:
    """Download the present content of a small remote file."""
    content = copies.storage.read(name, LISTING_BYTES)
    if content is None:
        raise copies.storage.explain("missing", copies.storage.url_of(name), "")
    return content


def _check_same_store(folder: Path) -> None:
    """Check that a folder holds no store prepared on this machine, whose shards would be evicted."""
    if (folder / _SOURCE).exists() or not folder.exists():
        return
    if not folder.is_dir() or any(path.name not in (KEEPING, "tokenizer") for path in folder.iterdir()):
        raise ConfigError(
            "copies of the remote store cannot be kept here: the folder holds something else",
            where=str(folder),
            fix="set data.store to another folder; or data.remote=null to train from what is there",
        )


def _wrong(where: str, problem: str) -> DataError:
    return DataError(f"the remote store is damaged: {problem}", where=where, fix="upload it again")

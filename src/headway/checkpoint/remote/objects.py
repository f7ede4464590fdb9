"""A folder in object storage, or on any file system that `fsspec` knows: operations that either happen or say why.

What may pass (a server that does not answer, 503, a cut connection) is tried again for a while, and then becomes
`UnreachableError`. Nothing that matters rests on a listing, since listings may be stale.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from headway.core.console import notice, warning
from headway.core.errors import CheckpointError, ConfigError, HeadwayError
from headway.core.faults import fault_point
from headway.core.format import format_bytes
from headway.core.object_storage import TooLargeError, credentials_fix, filesystem, kind_of, read_whole, scheme_of

#: Bytes sent or fetched in one request. Four of them are under way at a time.
PART_BYTES = 16 * 2**20
_AT_A_TIME = 4
#: Bytes that a record may have: a claim, who owns a place, a hint of the newest checkpoint. Each is below 2 KB.
RECORD_BYTES = 64 * 1024
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0
_S3 = ("s3", "s3a")

T = TypeVar("T")


class NoAnswer(CheckpointError):
    """What was asked is not known: nothing may be done that takes an object for damaged or gone."""


class UnreachableError(NoAnswer):
    """A store does not answer, or not as it should, for a reason that may pass."""


class GivenUp(NoAnswer):
    """Waiting for a store was ended because the program ends."""


@dataclass(frozen=True)
class Facts:
    """What a store says of an object."""

    bytes: int
    version: str
    """Checksum or time of the last change; it differs when the content does."""


class Objects:
    """The objects below one URL.

    Args:
        url: The folder, with a scheme.
        options: What `fsspec` needs to reach it.
        patience_seconds: How long one operation is tried again while the store cannot be reached.
        stopping: Set when the program ends: nothing is tried again then.
        within: On a mounted file system, the folder around this one has to be there already, or the store counts as
            away: one that is not mounted looks like one with nothing in it.

    Raises:
        ConfigError: the scheme is unknown, or needs a package that is not installed.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        patience_seconds: float = 60.0,
        stopping: threading.Event | None = None,
        within: bool = False,
    ) -> None:
        self.url, self.options = url.rstrip("/"), dict(options or {})
        self.patience_seconds, self.stopping = patience_seconds, stopping or threading.Event()
        self._scheme = str(scheme_of(url))
        self._away = False
        try:
            self._files, root = filesystem(self.url, self.options, "keeping checkpoints at")
        except HeadwayError:
            raise
        except Exception as error:
            raise self._error(self.url, error) from error
        self._root = root.rstrip("/")
        self._around = Path(self._root).parent if within and self.local else None

    @property
    def local(self) -> bool:
        """Whether this is a mounted file system."""
        return self._scheme in ("file", "local")

    def at(self, name: str) -> Objects:
        """The objects of a folder in this one."""
        below = object.__new__(type(self))
        below.__dict__.update(self.__dict__)
        below.url, below._root = self.url_of(name), self._path(name)
        return below

    def url_of(self, name: str) -> str:
        """Where an object lies."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # Reading

    def folders(self) -> list[str]:
        """Names of what lies right here, as a listing tells: it may be behind.

        Raises:
            CheckpointError: the store cannot be reached or does not let us in.
        """

        def ask() -> list[str]:
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found} - {""})

        return self._again("", ask)

    def facts(self, name: str) -> Facts | None:
        """Size and version; None when there is no such object."""

        def ask() -> Facts | None:
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._path(name))
            except FileNotFoundError:
                return None
            keys = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "mtime")
            version = next((f"{key}:{info[key]}" for key in keys if info.get(key)), "")
            return Facts(int(info["size"]), version.replace('"', ""))

        return self._again(name, ask)

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes | None:
        """Return a small object as it is now; None when there is none.

        Args:
            name: Of the object.
            most: Bytes that an object of its kind may have.

        Raises:
            CheckpointError: it has more.
        """

        def ask() -> bytes | None:
            try:
                return read_whole(self._files, self._path(name), most)
            except FileNotFoundError:
                return None

        try:
            return self._again(name, ask)
        except TooLargeError:
            raise self._too_large(name, most) from None

    def _too_large(self, name: str, most: int) -> CheckpointError:
        found = Objects.facts(self, name)
        size = format_bytes(found.bytes) if found is not None and found.bytes > most else "more bytes than that"
        return CheckpointError(
            f"at most {format_bytes(most)} are read of an object of this kind, and this one has {size}",
            where=self.url_of(name),
            fix="no run has written it so: see what it is, and remove it if it belongs to no one",
        )

    def fetch(self, name: str, path: Path, size: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Download an object of a known size, going on where an earlier download of it has ended."""
        path.touch()
        with path.open("r+b") as file:
            done = file.seek(0, os.SEEK_END)
            if done > size:  # it is not of this object
                file.truncate(0)
                done = file.seek(0)
            advance(done)
            while done < size:
                end = min(done + PART_BYTES, size)
                data = self._again(name, partial(self._part, name, done, end))
                file.write(data)
                done = end
                advance(len(data))
                fault_point("bring.part")
            file.flush()
            os.fsync(file.fileno())

    def _part(self, name: str, start: int, end: int) -> bytes:
        data = bytes(self._files.cat_file(self._path(name), start=start, end=end))
        if len(data) != end - start:
            raise ConnectionError(f"{len(data):,} of {end - start:,} bytes came")
        return data

    # Writing

    def put(self, name: str, path: Path) -> Facts:
        """Upload a file, in parts if it is large, in place of what is there."""

        def send() -> None:
            if self.local:
                _copy_file(path, Path(self._path(name)))
                return
            # In memory there are no more than so many parts at a time, whatever the size.
            parts = {"chunksize": PART_BYTES, "max_concurrency": _AT_A_TIME} if self._scheme in _S3 else {}
            self._files.put_file(str(path), self._path(name), **parts)

        self._again(name, send)
        found = self.facts(name)
        if found is None or found.bytes != path.stat().st_size:
            there = "nothing" if found is None else f"{found.bytes:,} bytes"
            raise UnreachableError(
                f"an upload of {path.stat().st_size:,} bytes has left {there}",
                where=self.url_of(name),
                fix="it is sent again by itself; if this stays, check the store",
            )
        return found

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object if there is none of that name, in one step where the store can (S3: If-None-Match).

        Returns:
            Whether it is ours: False when there was one with another content.
        """

        def send() -> bool:
            try:
                if self.local:
                    _create_file(Path(self._path(name)), content)
                else:
                    self._files.pipe_file(self._path(name), content, mode="create")
                return True
            except OSError as error:
                if not isinstance(error, FileExistsError) and "precondition" not in str(error).lower().replace("-", ""):
                    raise
                there = self.read(name, max(len(content), RECORD_BYTES))
                if there is None:  # taken for another's, it would cost a claim or all uploads that follow
                    raise ConnectionError("it refuses to write what is not there, as if it were") from error
                # Our own, when the answer to an earlier try was lost on the way.
                return there == content

        return self._again(name, send)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, in place of what is there."""

        def send() -> None:
            if self.local:
                _replace_file(Path(self._path(name)), content)
            else:
                self._files.pipe_file(self._path(name), content)

        self._again(name, send)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after the other; those that are not there are passed over."""
        for name in names:

            def ask(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))

            self._again(name, ask)

    def make_folder(self) -> None:
        """Make the folder, and those above it, where a store has folders that are not made by what is put there."""
        if self.local:
            self._again("", lambda: Path(self._root).mkdir(parents=True, exist_ok=True))

    def remove_folder(self) -> None:
        """Remove what is left of an emptied folder, where a store has folders."""
        if self.local:
            with contextlib.suppress(OSError):
                Path(self._root).rmdir()

    # What goes wrong

    def _again(self, name: str, ask: Callable[[], T]) -> T:
        """An answer; asked for again, ever more patiently, while what goes wrong may pass."""
        url = self.url_of(name) if name else self.url
        until, wait = time.monotonic() + self.patience_seconds, _FIRST_WAIT_SECONDS
        while True:
            try:
                self._check_mounted()
                answer = ask()
                break
            except (HeadwayError, TooLargeError):
                raise
            except Exception as error:
                kind, reason = kind_of(error)
                if kind != "unreachable" or time.monotonic() + wait > until:
                    raise self._error(url, error) from error
                if not self._away:
                    self._away = True
                    warning(f"{url} does not answer as it should ({reason}); trying again")
            if self.stopping.wait(wait * random.uniform(0.7, 1.3)):
                raise GivenUp("the upload is not finished", where=url, fix="the next attempt goes on with it")
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        if self._away:
            self._away = False
            notice(f"{self.url} answers again")
        return answer

    def _check_mounted(self) -> None:
        if self._around is not None and not self._around.is_dir():
            raise ConnectionError(f"there is no folder {self._around}; mount it, or make it if it is to be a new one")

    def _error(self, url: str, error: Exception) -> HeadwayError:
        kind, reason = kind_of(error)
        if kind == "credentials":
            return ConfigError(f"the store does not let us in: {reason}", where=url, fix=credentials_fix(url))
        if kind == "unreachable":
            fix = "check the network, checkpoint.remote.url and checkpoint.remote.options"
            return UnreachableError(f"the store cannot be reached: {reason}", where=url, fix=fix)
        if kind == "missing":  # a missing object is an answer: this is about what objects are in
            what = f"there is no such bucket, container or folder: {reason}"
            return CheckpointError(what, where=url, fix="make it, or check checkpoint.remote.url")
        return CheckpointError(f"the store cannot be used: {reason}", where=url, fix="check checkpoint.remote.url")


def _create_file(path: Path, content: bytes) -> None:
    """A new file that is whole from its first moment: a hard link to a finished one, which fails where there is one."""
    temporary = _written_beside(path, content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def _replace_file(path: Path, content: bytes) -> None:
    _written_beside(path, content).replace(path)


def _copy_file(source: Path, target: Path) -> None:
    temporary = _written_beside(target, b"")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _written_beside(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary

"""A folder in object storage or on any `fsspec` file system, with operations that either succeed or explain why not.

Transient faults (no answer, 503, a cut connection) are retried for a while and then become `UnreachableError`. No
guarantee rests on a listing, since listings may be stale.
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

#: Bytes of one request.
PART_BYTES = 16 * 2**20
#: Requests of one upload under way at a time.
_AT_A_TIME = 4
#: Size limit of a small record (a claim, the owner of a tier, the hint of the newest step). Real ones are below 2 KB.
RECORD_BYTES = 64 * 1024
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0
_S3 = ("s3", "s3a")

T = TypeVar("T")


class NoAnswer(CheckpointError):
    """The store gave no answer, so an object must not be treated as damaged or missing."""


class UnreachableError(NoAnswer):
    """The store does not answer, or not properly, for a reason that may be transient."""


class GivenUp(NoAnswer):
    """A retry ended because the program ends."""


@dataclass(frozen=True)
class Facts:
    """A store's metadata of an object."""

    bytes: int
    version: str
    """Checksum or time of the last change; it changes with the content."""


class Objects:
    """The objects below one URL.

    Args:
        url: The folder, with a scheme.
        options: Options for `fsspec`.
        patience_seconds: How long to retry one operation while the store cannot be reached.
        stopping: Set when the program ends, which ends all retries.
        within: Whether the parent folder must exist on a mounted file system. Without it, a file system that is not
            mounted would look like an empty one.

    Raises:
        ConfigError: The scheme is unknown, or needs a package that is not installed.
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
        """Return the objects of a subfolder."""
        below = object.__new__(type(self))
        below.__dict__.update(self.__dict__)
        below.url, below._root = self.url_of(name), self._path(name)
        return below

    def url_of(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # Reading

    def folders(self) -> list[str]:
        """List the names of folders and objects directly in this folder; the listing may lag.

        Raises:
            CheckpointError: The store cannot be reached.
            ConfigError: The store denies access.
        """

        def ask() -> list[str]:
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found} - {""})

        return self._with_retries("", ask)

    def facts(self, name: str) -> Facts | None:
        """Return the size and version of an object; None if there is none."""

        def ask() -> Facts | None:
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._path(name))
            except FileNotFoundError:
                return None
            keys = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "mtime")
            version = next((f"{key}:{info[key]}" for key in keys if info.get(key)), "")
            return Facts(int(info["size"]), version.replace('"', ""))

        return self._with_retries(name, ask)

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes | None:
        """Return the content of a small object; None if there is none.

        Args:
            name: Name of the object.
            most: Size limit for an object of its kind, in bytes.

        Raises:
            CheckpointError: The object is larger.
        """

        def ask() -> bytes | None:
            try:
                return read_whole(self._files, self._path(name), most)
            except FileNotFoundError:
                return None

        try:
            return self._with_retries(name, ask)
        except TooLargeError:
            raise self._too_large(name, most) from None

    def _too_large(self, name: str, most: int) -> CheckpointError:
        found = Objects.facts(self, name)
        size = format_bytes(found.bytes) if found is not None and found.bytes > most else "more bytes than that"
        return CheckpointError(
            f"an object of this kind has at most {format_bytes(most)}, and this one has {size}",
            where=self.url_of(name),
            fix="no run has written it like this: inspect it, and remove it if it is not needed",
        )

    def fetch(self, name: str, path: Path, size: int, advance: Callable[[int], None] = lambda _: None) -> None:
        """Download an object of a known size, continuing an earlier download of it."""
        path.touch()
        with path.open("r+b") as file:
            done = file.seek(0, os.SEEK_END)
            if done > size:  # a file of another object
                file.truncate(0)
                done = file.seek(0)
            advance(done)
            while done < size:
                end = min(done + PART_BYTES, size)
                data = self._with_retries(name, partial(self._part, name, done, end))
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
        """Upload a file, in parts if it is large, and replace an existing object."""

        def send() -> None:
            if self.local:
                _copy_file(path, Path(self._path(name)))
                return
            # This bounds the memory, whatever the size of the file.
            parts = {"chunksize": PART_BYTES, "max_concurrency": _AT_A_TIME} if self._scheme in _S3 else {}
            self._files.put_file(str(path), self._path(name), **parts)

        self._with_retries(name, send)
        found = self.facts(name)
        if found is None or found.bytes != path.stat().st_size:
            there = "nothing" if found is None else f"{found.bytes:,} bytes"
            raise UnreachableError(
                f"an upload of {path.stat().st_size:,} bytes has left {there}",
                where=self.url_of(name),
                fix="the upload is repeated automatically; if this happens again, check the store",
            )
        return found

    def create(self, name: str, content: bytes) -> bool:
        """Create a small object unless it exists, atomically if the store can (S3: If-None-Match).

        Returns:
            Whether the object has this content now; False if one with another content existed.
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
                if there is None:  # mistaken for another writer's object, this would cost a claim or all later uploads
                    raise ConnectionError("it refuses to create an object that does not exist") from error
                # The object is our own if the answer to an earlier try was lost.
                return there == content

        return self._with_retries(name, send)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and replace an existing one."""

        def send() -> None:
            if self.local:
                _replace_file(Path(self._path(name)), content)
            else:
                self._files.pipe_file(self._path(name), content)

        self._with_retries(name, send)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects one after the other; missing ones are ignored."""
        for name in names:

            def ask(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._path(name))

            self._with_retries(name, ask)

    def make_folder(self) -> None:
        """Make the folder and its parents, on a mounted file system; object stores have no real folders."""
        if self.local:
            self._with_retries("", lambda: Path(self._root).mkdir(parents=True, exist_ok=True))

    def remove_folder(self) -> None:
        """Remove an empty folder, on a mounted file system."""
        if self.local:
            with contextlib.suppress(OSError):
                Path(self._root).rmdir()

    # Errors

    def _with_retries(self, name: str, ask: Callable[[], T]) -> T:
        """Return the result of an operation; retry transient faults with growing pauses."""
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
                raise GivenUp("the upload is not finished", where=url, fix="the next attempt continues it")
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        if self._away:
            self._away = False
            notice(f"{self.url} answers again")
        return answer

    def _check_mounted(self) -> None:
        if self._around is not None and not self._around.is_dir():
            raise ConnectionError(f"there is no folder {self._around}; mount it, or make it if it is new")

    def _error(self, url: str, error: Exception) -> HeadwayError:
        kind, reason = kind_of(error)
        if kind == "credentials":
            return ConfigError(f"the store denies access: {reason}", where=url, fix=credentials_fix(url))
        if kind == "unreachable":
            fix = "check the network, checkpoint.remote.url and checkpoint.remote.options"
            return UnreachableError(f"the store cannot be reached: {reason}", where=url, fix=fix)
        if kind == "missing":  # a missing object is no error, so this is its bucket, container or folder
            what = f"there is no such bucket, container or folder: {reason}"
            return CheckpointError(what, where=url, fix="make it, or check checkpoint.remote.url")
        return CheckpointError(f"the store cannot be used: {reason}", where=url, fix="check checkpoint.remote.url")


def _create_file(path: Path, content: bytes) -> None:
    """Create a file atomically: a hard link to a complete temporary file, which fails if the name exists."""
    temporary = _write_temporary(path, content)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()


def _replace_file(path: Path, content: bytes) -> None:
    _write_temporary(path, content).replace(path)


def _copy_file(source: Path, target: Path) -> None:
    temporary = _write_temporary(target, b"")
    try:
        shutil.copyfile(source, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_temporary(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return temporary

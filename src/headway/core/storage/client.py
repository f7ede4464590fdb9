"""The storage client: operations on objects behind a URL that either succeed or explain why not.

There is one retry policy. Transient faults (no answer, 503, a cut connection) are retried with growing pauses, and then
become an error. No guarantee rests on a listing, since listings may be stale.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from headway.core.console import notice, warning
from headway.core.errors import HeadwayError
from headway.core.format import format_bytes, format_seconds
from headway.core.process.faults import fault_point
from headway.core.storage import mounted
from headway.core.storage.filesystem import CLOUDS, WEB, Kind, filesystem, has_retried, kind_of, scheme_of
from headway.core.storage.listing import (
    ObjectInfo,
    fixed_part,
    is_glob,
    is_pinned,
    join,
    last_part,
    pin_commit,
    version_of,
)
from headway.core.storage.reading import BlockReader, StreamReader, TooLargeError, read_whole

#: What is wrong with an object: the meaning of its store's error, or an observation of the client.
#:
#: - `stopped`: retries ended because the program ends.
#: - `unsized`, `short`, `long`: the length is unknown, or the content ends before it or continues after it.
#: - `large`: more bytes than are read into memory.
#: - `incomplete`: an upload has left something else.
Problem = Kind | Literal["stopped", "unsized", "short", "long", "large", "incomplete"]

#: Bytes of one request of an upload or a download.
PART_BYTES = 16 * 2**20
#: Size limit of a small record (a claim, the owner of a tier, the hint of the newest step). Real ones are below 2 KB.
RECORD_BYTES = 64 * 1024
#: Requests of one upload under way at a time.
_AT_A_TIME = 4
#: Pauses between the tries of a request, without jitter: the first, which doubles, and the longest.
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
_JITTER = (0.7, 1.3)
_BLOCK_BYTES = 2**20
# Possible answers of a store to a glob in place of a name. The listing that follows reports a real problem.
_NOT_THERE: tuple[Kind, ...] = ("missing", "credentials", "other")

T = TypeVar("T")


class Storage(ABC):
    """The object at a URL, and the objects below it. Subclasses put errors in the words of their domain.

    A request that fails for a transient reason is retried until it has been tried `tries` times and `patience_seconds`
    have passed; tries of the library itself count.

    Args:
        url: A folder or an object, with a scheme.
        options: Options for `fsspec`.
        patience_seconds: How long to retry one request while the store cannot be reached.
        stopping: Set when the program ends, which ends all retries.
        within: Whether the parent folder must exist on a mounted file system. Without it, a file system that is not
            mounted would look like an empty one.

    Raises:
        ConfigError: The scheme is unknown, or needs a package that is not installed.
    """

    #: What the store is used for, in the error about a missing package: `reading`.
    purpose: ClassVar[str]
    tries: ClassVar[int] = 1

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        patience_seconds: float = 60.0,
        stopping: threading.Event | None = None,
        within: bool = False,
    ) -> None:
        self._scheme = str(scheme_of(url))
        self.web = self._scheme in WEB
        self.url, self.options = url if self.web else _without_slash(url), dict(options or {})
        self.patience_seconds, self.stopping = patience_seconds, stopping or threading.Event()
        self._away = False
        try:
            self._files, root = filesystem(self.url, self.options, self.purpose)
        except HeadwayError:
            raise
        except Exception as error:
            kind, reason = kind_of(error)
            raise self.explain(kind, self.url, reason) from error
        self._root = root if self.web or not root.strip("/") else root.rstrip("/")
        self._around = Path(self._root).parent if within and self.local else None

    @abstractmethod
    def explain(self, problem: Problem, url: str, reason: str) -> HeadwayError:
        """Return the error for a problem with an object.

        Args:
            problem: What is wrong.
            url: The object, or the folder.
            reason: The problem in words.
        """

    @property
    def local(self) -> bool:
        """Whether this is a mounted file system."""
        return self._scheme in ("file", "local")

    def at(self, name: str) -> Self:
        """Return the storage of a subfolder."""
        below = copy.copy(self)
        below.url, below._root = self.url_of(name), self._path(name)
        return below

    def with_patience(self, seconds: float) -> Self:
        """Return this storage with another patience."""
        other = copy.copy(self)
        other.patience_seconds = seconds
        return other

    def url_of(self, name: str) -> str:
        """Return the URL of an object; the query of a web address is kept for every object."""
        return join(self.url, name)

    def _path(self, name: str) -> str:
        return join(self._root, name)

    # Listing

    def names(self) -> list[str]:
        """List the names of folders and objects directly in this folder; the listing may lag."""

        def ask() -> list[str]:
            self._files.invalidate_cache()
            found = _unless_missing(lambda: self._files.ls(self._root, detail=False)) or []
            return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found} - {""})

        return self._with_retries(self.url, ask)

    def find(self) -> tuple[str, list[ObjectInfo]]:
        """Return the kind of place behind the URL (file, folder, glob or nothing), and its objects without hidden ones.

        The URLs of objects in a repository of the Hugging Face Hub name its present commit.
        """
        files = self._files
        url = self.url
        path = self._root
        files.invalidate_cache()  # `fsspec` caches listings; this one must be current
        if self._scheme == "hf":
            path = self._with_retries(url, lambda: pin_commit(files, self._root))
            url = f"hf://{path}"
        # A name may look like a glob. An existing object of that name takes precedence, as on a local disk.
        absent = _NOT_THERE if is_glob(url) else ("missing",)
        info = self._with_retries(self.url, lambda: _unless(absent, lambda: files.info(path)))
        if info is None and not is_glob(url):
            return "nothing", []
        if info is not None and info.get("type") == "file":
            return "file", [self._describe(url, path, last_part(url), info)]
        listed = self._with_retries(
            self.url, lambda: files.glob(path, detail=True) if info is None else files.find(path, detail=True)
        )
        root = fixed_part(path) if info is None else path
        found = []
        for place, facts in listed.items():
            name = place.removeprefix(root).lstrip("/")
            hidden = any(part.startswith(".") for part in name.split("/"))
            if facts.get("type") == "file" and name and not name.endswith("/") and not hidden:
                target = place if self.web else f"{self._scheme}://{place.lstrip('/')}"
                if self.web:
                    # A web page lists only names.
                    facts = self._with_retries(target, partial(files.info, target))
                found.append(self._describe(target, target, name, facts))
        return "folder" if info is not None else "glob", found

    def stat(self, name: str = "") -> ObjectInfo | None:
        """Return the present size and version of an object; None if there is none."""
        url = self.url_of(name)
        path = self._path(name)

        def ask() -> Mapping[str, Any] | None:
            if not is_pinned(url):
                self._files.invalidate_cache()
            return _unless_missing(lambda: self._files.info(path))

        info = self._with_retries(url, ask)
        return None if info is None else ObjectInfo(url, last_part(url), self._size(url, info), version_of(info))

    def _describe(self, url: str, path: str, name: str, info: Mapping[str, Any]) -> ObjectInfo:
        size = self._size(url, info)
        ranges = not self.web or self._serves_ranges(url, path, info, size)
        return ObjectInfo(url, name, size, version_of(info), ranges)

    def _size(self, url: str, info: Mapping[str, Any]) -> int:
        size = info.get("size")
        if size is None:
            raise self.explain("unsized", url, "the server does not report its length")
        return int(size)

    def _serves_ranges(self, url: str, path: str, info: Mapping[str, Any], size: int) -> bool:
        """Return whether a web server serves ranges, by a request for the last byte: many do not announce it."""
        if info.get("partial") is False:
            return False
        if size < 2:
            return True
        try:
            return len(self._with_retries(url, lambda: self._range(path, size - 1, size, size))) == 1
        except HeadwayError:
            return False

    # Reading

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes | None:
        """Return the content of a small object; None if there is none.

        Args:
            name: Name of the object.
            most: Size limit for an object of its kind, in bytes.
        """
        path = self._path(name)
        try:
            return self._with_retries(
                self.url_of(name), lambda: _unless_missing(lambda: read_whole(self._files, path, most))
            )
        except TooLargeError:
            found = Storage.stat(self, name)
        size = format_bytes(found.bytes) if found is not None and found.bytes > most else "more bytes than that"
        reason = f"an object of this kind has at most {format_bytes(most)}, and this one has {size}"
        raise self.explain("large", self.url_of(name), reason) from None

    def open(
        self,
        name: str,
        size: int,
        *,
        ranges: bool = True,
        start: int = 0,
        end: int | None = None,
        until: float | None = None,
    ) -> BlockReader | StreamReader:
        """Open an object of known size as a stream of its bytes.

        Args:
            name: Name of the object; empty for the one at the URL.
            size: Its size.
            ranges: Whether it can be read from any offset. If not, the stream cannot seek, and what was read comes
                again when an answer is cut.
            start: Start of the part to read, a hint. The stream begins at byte 0 all the same.
            end: End of that part; the end of the object if None.
            until: When patience ends; by default it begins anew with every request.
        """
        url = self.url_of(name)
        path = self._path(name)
        wrong_size = partial(self._wrong_size, url, size)
        if not ranges:
            begin = partial(self._files.open, path, mode="rb", block_size=0)
            return StreamReader(begin, size, lambda ask: self._with_retries(url, ask, until), wrong_size)

        def fetch(first: int, last: int) -> bytes:
            return self._with_retries(url, lambda: self._range(path, first, last, size), until)

        return BlockReader(fetch, size, (start, end), wrong_size)

    def stream_to(self, name: str, size: int, take: Callable[[bytes], object]) -> str:
        """Pass the content of an object of known size to a function, and return its SHA-256 in hexadecimal.

        `patience_seconds` holds for all of it. A web server sends the whole object in one answer.

        Args:
            name: Name of the object.
            size: Its size.
            take: Called with each block.
        """
        hashed = hashlib.sha256()
        until = time.monotonic() + self.patience_seconds
        with self.open(name, size, ranges=not self.web, until=until) as stream:
            while data := stream.read(_BLOCK_BYTES):
                hashed.update(data)
                take(data)
        return hashed.hexdigest()

    def download(self, name: str, path: Path, size: int, advance: Callable[[int], None] = lambda _: None) -> None:
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
                data = self._with_retries(self.url_of(name), partial(self._part, name, done, end, size))
                file.write(data)
                done = end
                advance(len(data))
                fault_point("bring.part")
            file.flush()
            os.fsync(file.fileno())

    def _part(self, name: str, start: int, end: int, size: int) -> bytes:
        data = self._range(self._path(name), start, end, size)
        if len(data) != end - start:
            raise ConnectionError(f"{len(data):,} of {end - start:,} bytes came")
        return data

    def _range(self, path: str, start: int, end: int, size: int) -> bytes:
        """Read bytes [start, end) of an object in one request."""
        if not self.web:
            return bytes(self._files.cat_file(path, start=start, end=end))
        # `cat_file` would download the whole object from a server that does not support ranges.
        with self._files.open(path, mode="rb", size=size, cache_type="none") as stream:
            stream.seek(start)
            return bytes(stream.read(end - start))

    def _wrong_size(self, url: str, size: int, found: int) -> HeadwayError:
        if found > size:
            return self.explain("long", url, f"continues after its announced {size:,} bytes")
        return self.explain("short", url, f"ends after {found:,} of {size:,} bytes")

    # Writing

    def upload(self, name: str, path: Path) -> ObjectInfo:
        """Upload a file, in parts if it is large, and replace an existing object."""

        def send() -> None:
            if self.local:
                mounted.copy_file(path, Path(self._path(name)))
                return
            # This bounds the memory, whatever the size of the file.
            in_parts = CLOUDS.get(self._scheme) == "aws"
            parts = {"chunksize": PART_BYTES, "max_concurrency": _AT_A_TIME} if in_parts else {}
            self._files.put_file(str(path), self._path(name), **parts)

        self._with_retries(self.url_of(name), send)
        found = Storage.stat(self, name)
        size = path.stat().st_size
        if found is None or found.bytes != size:
            there = "nothing" if found is None else f"{found.bytes:,} bytes"
            raise self.explain("incomplete", self.url_of(name), f"an upload of {size:,} bytes has left {there}")
        return found

    def create(self, name: str, content: bytes) -> bool:
        """Create a small object unless it exists, atomically if the store can (S3: If-None-Match).

        Returns:
            Whether the object has this content now; False if one with another content existed.
        """

        def send() -> bool:
            try:
                if self.local:
                    mounted.create_file(Path(self._path(name)), content)
                else:
                    self._files.pipe_file(self._path(name), content, mode="create")
                return True
            except OSError as error:
                if not isinstance(error, FileExistsError) and "precondition" not in str(error).lower().replace("-", ""):
                    raise
                there = Storage.read(self, name, max(len(content), RECORD_BYTES))
                if there is None:  # mistaken for another writer's object, this would cost a claim or all later uploads
                    raise ConnectionError("it refuses to create an object that does not exist") from error
                # The object is our own if the answer to an earlier try was lost.
                return there == content

        return self._with_retries(self.url_of(name), send)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object, and replace an existing one."""

        def send() -> None:
            if self.local:
                mounted.replace_file(Path(self._path(name)), content)
            else:
                self._files.pipe_file(self._path(name), content)

        self._with_retries(self.url_of(name), send)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects one after the other; missing ones are ignored."""
        for name in names:
            path = self._path(name)
            self._with_retries(self.url_of(name), partial(_unless_missing, partial(self._files.rm_file, path)))

    def make_folder(self) -> None:
        """Make the folder and its parents, on a mounted file system; object stores have no real folders."""
        if self.local:
            self._with_retries(self.url, lambda: Path(self._root).mkdir(parents=True, exist_ok=True))

    def remove_folder(self) -> None:
        """Remove an empty folder, on a mounted file system."""
        if self.local:
            with suppress(OSError):
                Path(self._root).rmdir()

    # Faults

    def _with_retries(self, url: str, ask: Callable[[], T], until: float | None = None) -> T:
        """Return the result of a request; retry transient faults with growing pauses, and explain a final failure.

        Args:
            url: The object, or the folder.
            ask: Makes the request.
            until: When patience ends, by the monotonic clock; `patience_seconds` from now if None.
        """
        until = time.monotonic() + self.patience_seconds if until is None else until
        wait = FIRST_WAIT_SECONDS
        tried = 0
        while True:
            try:
                if self._around is not None and not self._around.is_dir():
                    raise ConnectionError(f"there is no folder {self._around}; mount it, or make it if it is new")
                answer = ask()
                break
            except (HeadwayError, TooLargeError):
                raise
            except Exception as error:
                kind, reason = kind_of(error)
                tried = max(self.tries, tried + 1) if has_retried(error) else tried + 1
                pause = wait * random.uniform(*_JITTER)
                if kind != "unreachable" or (tried >= self.tries and time.monotonic() + pause > until):
                    raise self.explain(kind, url, reason) from error
                if tried >= self.tries and not self._away:  # once, not from every thread
                    self._away = True
                    patience = format_seconds(self.patience_seconds)
                    warning(f"{url} does not answer as it should ({reason}); trying again for {patience}")
            if self.stopping.wait(pause):
                raise self.explain("stopped", url, "the program ends")
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        if self._away:
            self._away = False
            notice(f"{self.url} answers again")
        return answer


def _unless(absent: Iterable[Kind], ask: Callable[[], T], errors: type[Exception] = Exception) -> T | None:
    """Return the result of a request, or None if it fails for one of these reasons."""
    try:
        return ask()
    except errors as error:
        if kind_of(error)[0] in absent:
            return None
        raise


def _unless_missing(ask: Callable[[], T]) -> T | None:
    """Return the result of a request, or None if there is no such object. A missing bucket is an error."""
    return _unless(("missing",), ask, FileNotFoundError)


def _without_slash(url: str) -> str:
    place = url.partition("://")[2]
    return url.rstrip("/") if place.strip("/") else url

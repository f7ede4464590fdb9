"""Remote files through `fsspec`: listed, and read in blocks with retries, never as a whole.

Every failure becomes one `DataError` that names the URL. A file shorter than when it was listed is an error too, since
half a document must not pass for a whole one.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from headway.core.errors import DataError, HeadwayError
from headway.core.object_storage import WEB, Kind, credentials_fix, filesystem, kind_of, missing_fix, scheme_of

#: Seconds before each retry of a request that failed temporarily.
WAITS = (0.5, 1.0, 2.0)
#: Bytes of one request: the largest, and the first.
_LARGEST, _SMALLEST = 8 * 2**20, 2**18
#: A file of at most this many bytes is fetched as a whole.
_SMALL = 2**20

# Errors without retries: the library has already retried for seconds, or a retry cannot help.
_TRIED = {"EndpointConnectionError", "OfflineModeIsEnabled"}
# The last key is from the Hugging Face Hub: the id of the git object, which for a large file depends on its SHA-256.
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "Content-MD5", "Digest", "blob_id")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")

# A commit of the Hugging Face Hub in a URL.
_COMMIT = re.compile(r"^hf://[^@]+@[0-9a-f]{40}(/|$)")

# Possible answers of a store to a glob in place of a file name. The listing that follows reports a real problem.
_NOT_THERE: tuple[Kind, ...] = ("missing", "credentials", "other")

T = TypeVar("T")


class MissingError(DataError):
    """There is no such file, or no longer."""


class UnreachableError(DataError):
    """A remote store does not answer, or fails temporarily."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote store."""

    url: str
    name: str
    bytes: int
    version: str | None
    ranges: bool = True


def list_files(url: str, options: Mapping[str, Any]) -> tuple[str, list[RemoteFile]]:
    """Return the kind of place behind a URL (file, folder, glob or nothing), and its files without hidden ones.

    Raises:
        ConfigError: the URL's scheme is unknown, or needs a package that is not installed.
        DataError: the place cannot be reached.
    """
    files, path = _filesystem(url, options)
    scheme = str(scheme_of(url))
    files.invalidate_cache()  # `fsspec` caches listings; this one must be current
    with _errors(url):
        if scheme == "hf":
            path = _with_retries(lambda: _pin_commit(files, path))
            url = f"{scheme}://{path}"
        # A file name may look like a glob. An existing file of that name takes precedence, as on a local disk.
        info = _found(lambda: files.info(path), _NOT_THERE if _is_glob(url) else ("missing",))
        if info is None and not _is_glob(url):
            return "nothing", []
        if info is not None and info.get("type") == "file":
            return "file", [_remote_file(files, url, path, _last_part(url), info)]
        kind = "folder" if info is not None else "glob"
        listed = files.glob(path, detail=True) if info is None else files.find(path, detail=True)
    root = _fixed_part(path) if info is None else path
    found = []
    for place, facts in listed.items():
        name = place.removeprefix(root).lstrip("/")
        hidden = any(part.startswith(".") for part in name.split("/"))
        if facts.get("type") == "file" and name and not name.endswith("/") and not hidden:
            target = place if scheme in WEB else f"{scheme}://{place.lstrip('/')}"
            if scheme in WEB:
                # A web page lists only names.
                facts = _again(target, partial(files.info, target))
            found.append(_remote_file(files, target, target, name, facts))
    return kind, found


def _pin_commit(files: Any, path: str) -> str:
    """Pin a path in a repository of the Hugging Face Hub to the present commit of its revision.

    A branch may advance while its files are read. Besides, the contents of a commit can be cached: otherwise every file
    would need a new listing of its folder, and the Hub limits requests per five minutes.
    """
    from huggingface_hub import HfApi

    found = files.resolve_path(path)
    repo = getattr(found, "repo_id", None)
    if repo is None:  # a bucket, which has no commits
        return path
    api = HfApi(endpoint=files.endpoint, token=files.token)
    commit = api.repo_info(repo, revision=found.revision, repo_type=found.repo_type).sha
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    return f"{kind}{repo}@{commit}/{found.path_in_repo}".rstrip("/")


def describe(url: str, options: Mapping[str, Any]) -> RemoteFile:
    """Return the present size and version of a file.

    Raises:
        DataError: the file is gone, or cannot be reached.
    """
    files, path = _filesystem(url, options)
    if not _COMMIT.search(url):
        files.invalidate_cache()
    info = _again(url, lambda: files.info(path))
    return RemoteFile(url, _last_part(url), _size(url, info), _version(info))


def open_remote(
    url: str, options: Mapping[str, Any], size: int, *, ranges: bool, start: int = 0, end: int | None = None
) -> io.RawIOBase:
    """Open a remote file of known size as a stream; see `places.open_file`."""
    files, path = _filesystem(url, options)
    if ranges:
        return _Blocks(url, _fetcher(files, url, path, size), size, start, end)
    return _Stream(url, _again(url, lambda: files.open(path, mode="rb", block_size=0)), size)


def _remote_file(files: Any, url: str, path: str, name: str, info: Mapping[str, Any]) -> RemoteFile:
    size = _size(url, info)
    ranges = scheme_of(url) not in WEB or _serves_ranges(files, url, path, info, size)
    return RemoteFile(url, name, size, _version(info), ranges)


def _size(url: str, info: Mapping[str, Any]) -> int:
    size = info.get("size")
    if size is None:
        raise DataError("the server does not report the file's length", where=url, fix="download it, and name the copy")
    return int(size)


def _serves_ranges(files: Any, url: str, path: str, info: Mapping[str, Any], size: int) -> bool:
    """Return whether a web server serves ranges of a file, by a request for the last byte: many do not announce it."""
    if info.get("partial") is False:
        return False
    if size < 2:
        return True
    try:
        return len(_fetcher(files, url, path, size)(size - 1, size)) == 1
    except DataError:
        return False


def _version(info: Mapping[str, Any]) -> str | None:
    for key in _CHECKSUMS:
        if info.get(key):
            return f"{key.lower()}:{info[key]}".replace('"', "")
    for key in _TIMES:
        if info.get(key):
            return f"{info.get('size')}:{info[key]}"
    return None


def _fetcher(files: Any, url: str, path: str, size: int) -> Callable[[int, int], bytes]:
    """Return a function that reads bytes [start, end) of a file in one request."""
    if scheme_of(url) not in WEB:
        return lambda start, end: _again(url, lambda: bytes(files.cat_file(path, start=start, end=end)))

    def fetch(start: int, end: int) -> bytes:
        # `cat_file` would download the whole file from a server that does not support ranges.
        with files.open(path, mode="rb", size=size, cache_type="none") as stream:
            stream.seek(start)
            return bytes(stream.read(end - start))

    return lambda start, end: _again(url, lambda: fetch(start, end))


class _Blocks(io.RawIOBase):
    """A remote file, read in requests that grow during sequential reading, with one request ahead of the reader."""

    def __init__(self, url: str, fetch: Callable[[int, int], bytes], size: int, start: int, end: int | None) -> None:
        self._url, self._fetch, self._size = url, fetch, size
        self._wanted = (max(0, start - 1), size if end is None else end)
        self._position = 0
        self._first, self._block = 0, memoryview(b"")
        self._next: tuple[int, int, Future[bytes]] | None = None
        self._step = _SMALLEST

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._size:
            return 0
        if not self._first <= self._position < self._first + len(self._block):
            self._load(len(buffer))
        offset = self._position - self._first
        count = min(len(buffer), len(self._block) - offset)
        buffer[:count] = self._block[offset : offset + count]
        self._position += count
        return count

    def _load(self, asked: int) -> None:
        """Load the block at the position; a small file as a whole."""
        position = self._position if self._size > _SMALL else 0
        straight_on = position == self._first + len(self._block)
        self._step = self._step if straight_on else _SMALLEST
        ready, self._next = self._next, None
        if ready and ready[0] == position:
            data, end = ready[2].result(), ready[1]
        else:
            if ready:
                ready[2].cancel()
            end = self._end_of_request(position, asked)
            data = self._fetch(position, end)
        if len(data) != end - position:
            raise _shorter(self._url, position + len(data), self._size)
        self._first, self._block = position, memoryview(data)
        if straight_on and self._wanted[0] <= position and end < self._wanted[1]:
            self._step = min(2 * self._step, _LARGEST)
            following = min(end + self._step, self._wanted[1])
            self._next = (end, following, _pool().submit(self._fetch, end, following))

    def _end_of_request(self, position: int, asked: int) -> int:
        if self._size <= _SMALL:
            return self._size
        first, last = self._wanted
        size = max(asked, self._step)
        if first <= position < last and last - position <= _LARGEST:
            # The last line of a span ends shortly after the span.
            size = max(size, last - position + 2**16)
        return min(position + size, self._size)

    def close(self) -> None:
        if self._next:
            self._next[2].cancel()
        self._next, self._block = None, memoryview(b"")
        super().close()


class _Stream(io.RawIOBase):
    """A file on a server without ranges, which can only be read from its beginning."""

    def __init__(self, url: str, stream: Any, size: int) -> None:
        self._url, self._stream, self._size = url, stream, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _errors(self._url):
            data = self._stream.read(len(buffer))
        self._position += len(data)
        if not data and self._position < self._size:
            raise _shorter(self._url, self._position, self._size)
        if self._position > self._size:  # the response may have no end
            raise _longer(self._url, self._size)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Return the threads for requests ahead of readers; each open file has at most one such request."""
    return ThreadPoolExecutor(4, "headway-remote")


def _filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the `fsspec` file system for a URL, and the path on it."""
    with _errors(url):
        return filesystem(url, options, "reading")


def _found(ask: Callable[[], T], none: Collection[Kind]) -> T | None:
    """Return the result of a request with retries, or None if it fails for one of these reasons."""
    try:
        return _with_retries(ask)
    except Exception as error:
        if kind_of(error)[0] in none:
            return None
        raise


def _again(url: str, ask: Callable[[], T]) -> T:
    """Return the result of a request with retries; a final failure becomes an error that names the URL."""
    with _errors(url):
        return _with_retries(ask)


def _with_retries(ask: Callable[[], T]) -> T:
    """Return the result of a request; retry after temporary failures."""
    for wait in WAITS:
        try:
            return ask()
        except Exception as error:
            if kind_of(error)[0] != "unreachable" or type(error).__name__ in _TRIED:
                raise
            time.sleep(wait)
    return ask()


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Convert exceptions of the libraries in a block to one error that names the URL."""
    try:
        yield
    except HeadwayError:
        raise
    except Exception as error:
        raise _error(url, error) from error


def _error(url: str, error: Exception) -> DataError:
    kind, reason = kind_of(error)
    if kind == "missing":
        return MissingError("there is no such remote file, or no longer", where=url, fix=missing_fix(url))
    if kind == "credentials":
        return DataError(f"the remote store does not let us in: {reason}", where=url, fix=credentials_fix(url))
    return (UnreachableError if kind == "unreachable" else DataError)(
        f"the remote store cannot be read: {reason}", where=url, fix="check the network and storage_options, and retry"
    )


def _shorter(url: str, found: int, size: int) -> DataError:
    return DataError(
        f"the remote file ends after {found:,} of {size:,} bytes: it changed, or was cut short",
        where=url,
        fix="prepare again when the file no longer changes",
    )


def _longer(url: str, size: int) -> DataError:
    return DataError(
        f"the remote file continues after its announced {size:,} bytes: it changed",
        where=url,
        fix="prepare again when the file no longer changes",
    )


def _is_glob(url: str) -> bool:
    # A question mark begins a web address's query.
    return any(sign in url for sign in ("*[" if scheme_of(url) in WEB else "*?["))


def _fixed_part(pattern: str) -> str:
    """Return the folders of a glob before its first wildcard."""
    parts = pattern.split("/")
    wild = next(number for number, part in enumerate(parts) if any(sign in part for sign in "*?["))
    return "/".join(parts[:wild])


def _last_part(url: str) -> str:
    path = url.split("?")[0].split("#")[0] if scheme_of(url) in WEB else url
    return path.rstrip("/").rsplit("/", 1)[-1]

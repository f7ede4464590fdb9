"""Reading of an object: as a whole within a limit, in blocks with one request ahead, or as one stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from headway.core.files.foreign import ForeignFileError, read_bytes
from headway.core.storage.filesystem import WEB, status_of

#: Bytes of one request of a `BlockReader`: the largest, and the first.
_LARGEST = 8 * 2**20
_SMALLEST = 2**18
#: A file of at most this many bytes is fetched as a whole.
_SMALL = 2**20
_BLOCK_BYTES = 256 * 1024


class TooLargeError(ValueError):
    """An object has more bytes than are read into memory."""


def read_whole(files: Any, path: str, most: int) -> bytes:
    """Return an object as it is now, without asking for its size first.

    What a server sends beyond the limit is not read, whatever length it announces, if any.

    Args:
        files: The `fsspec` file system.
        path: Path of the object.
        most: Largest size in bytes.

    Raises:
        TooLargeError: it is larger.
        OSError: as the file system reports it.
    """
    protocol = {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}
    if "file" in protocol:
        return _read_mounted(path, most)
    if "s3" in protocol:
        return _read_s3(files, path, most)
    if files.async_impl and not protocol.intersection(WEB):
        # `open` would request the size first. These services send no more than the requested range.
        try:
            content = bytes(files.cat_file(path, start=0, end=most + 1))
        except Exception as error:
            if status_of(error) != 416:  # the object is empty
                raise
            content = b""
    else:
        # A web server may ignore ranges, so its answer is read as a stream.
        options = {"block_size": 0} if protocol.intersection(WEB) else {}
        with files.open(path, "rb", **options) as stream:
            content = b"".join(_blocks(stream, most + 1))
    if len(content) > most:
        raise TooLargeError
    return content


def _blocks(stream: IO[bytes], left: int) -> Iterator[bytes]:
    while left > 0 and (block := stream.read(min(_BLOCK_BYTES, left))):
        yield block
        left -= len(block)


def _read_mounted(path: str, most: int) -> bytes:
    try:
        return read_bytes(Path(path), most)
    except ForeignFileError as error:
        if Path(path).is_file():
            raise TooLargeError from error
        raise


def _read_s3(files: Any, path: str, most: int) -> bytes:
    """Read an object of S3 block by block: `cat_file` would read everything from a server that ignores ranges."""
    from fsspec.asyn import sync

    bucket, key, version = files.split_path(path)
    body = files.call_s3("get_object", Bucket=bucket, Key=key, **({"VersionId": version} if version else {}))["Body"]

    async def read() -> bytes:
        content = bytearray()
        try:
            while len(content) <= most and (block := await body.read(min(_BLOCK_BYTES, most + 1 - len(content)))):
                content += block
        finally:
            body.close()
        return bytes(content)

    content: bytes = sync(files.loop, read)
    if len(content) > most:
        raise TooLargeError
    return content


class BlockReader(io.RawIOBase):
    """An object of known size, read in requests that grow during sequential reading, with one request ahead.

    Args:
        fetch: Returns bytes [start, end) of the object.
        size: Its size.
        part: Start and end of the part that will be read, a hint; an end of None is the end of the object.
        cut_short: Returns the error for an object that ends after so many bytes.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], bytes],
        size: int,
        part: tuple[int, int | None],
        cut_short: Callable[[int], Exception],
    ) -> None:
        self._fetch = fetch
        self._size = size
        self._cut_short = cut_short
        self._wanted = (max(0, part[0] - 1), size if part[1] is None else part[1])
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
        """Load the block at the position; a small object as a whole."""
        position = self._position if self._size > _SMALL else 0
        straight_on = position == self._first + len(self._block)
        self._step = self._step if straight_on else _SMALLEST
        ready = self._next
        self._next = None
        if ready and ready[0] == position:
            data = ready[2].result()
            end = ready[1]
        else:
            if ready:
                ready[2].cancel()
            end = self._end_of_request(position, asked)
            data = self._fetch(position, end)
        if len(data) != end - position:
            raise self._cut_short(position + len(data))
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


class StreamReader(io.RawIOBase):
    """An object on a server without ranges, read from its beginning; again from there when an answer is cut.

    Args:
        begin: Asks for the object.
        size: Size that the server has announced.
        retry: Calls a function until it succeeds, or raises an error that explains why it does not.
        wrong_size: Returns the error for an object that ends after so many bytes, or after more than `size`.
    """

    def __init__(
        self,
        begin: Callable[[], IO[bytes]],
        size: int,
        retry: Callable[[Callable[[], bytes]], bytes],
        wrong_size: Callable[[int], Exception],
    ) -> None:
        self._begin = begin
        self._size = size
        self._retry = retry
        self._wrong_size = wrong_size
        self._stream: IO[bytes] | None = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._retry(lambda: self._read(len(buffer)))
        self._position += len(data)
        # The answer may have no end.
        if self._position > self._size or (not data and self._position < self._size):
            raise self._wrong_size(self._position)
        buffer[: len(data)] = data
        return len(data)

    def _read(self, count: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._begin()
                for _ in _blocks(self._stream, self._position):
                    pass
            return self._stream.read(count)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        stream = self._stream
        self._stream = None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        self._drop()
        super().close()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Return the threads for requests ahead of readers; each open object has at most one such request."""
    return ThreadPoolExecutor(4, "headway-remote")

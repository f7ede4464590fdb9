"""Compressed files as streams of what is in them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from headway.core.errors import missing_extra
from headway.data.reading.places import SourceFile, open_file

#: Compressions by file ending.
ENDINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_BLOCK = 2**20
# As far back as `zstd --long=31` reaches, with which large dumps are written; memory is taken as a file asks for it.
_ZSTD_WINDOW = 2**31
# What a truncated or damaged compressed stream raises while it is read.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


@contextmanager
def open_content(file: SourceFile, start: int = 0, end: int | None = None) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed, for the length of a block; `start` and `end` are for plain ones, as in
    `places.open_file`.

    Raises:
        ConfigError: zstd needs an extra that is not installed.
        DataError: the file cannot be opened.
    """
    library = _zstandard(file.name) if file.compression == "zstd" else None
    with open_file(file, start, end) as raw:
        if file.compression == "gzip":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
        elif file.compression == "bz2":
            yield cast(BinaryIO, bz2.BZ2File(raw, "rb"))
        elif file.compression == "xz":
            yield cast(BinaryIO, lzma.LZMAFile(raw, "rb"))  # noqa: SIM115
        elif library is not None:
            yield cast(BinaryIO, io.BufferedReader(_ZstdStream(raw, library), _BLOCK))
        else:
            yield raw


class BlockReader:
    """Reads a stream in blocks. What comes before a damaged place is handed on first; a plain `read` would lose it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._error: Exception | None = None

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer before a damaged place, and at the end.

        Raises:
            Exception: what reading raised at the damaged place; see `is_damage`.
        """
        if self._error:
            raise self._error
        parts: list[bytes] = []
        try:
            while size and (data := self._stream.read1(size)):  # type: ignore[attr-defined]
                parts.append(data)
                size -= len(data)
        except Exception as error:
            if not parts:
                raise
            self._error = error
        return parts[0] if len(parts) == 1 else b"".join(parts)


def is_damage(error: BaseException) -> bool:
    """Whether reading failed for what is in the file, so that the rest can be left out; not for the disk it is on."""
    # The decompressors' own OSErrors have no number of the system's.
    return isinstance(error, _DAMAGE) or (isinstance(error, OSError) and error.errno is None)


def _zstandard(name: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise missing_extra("zstandard", "zstd", f"reading {name}") from None
    return zstandard


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of a zstd file; unlike the library's own reader it tells a cut file from a whole one."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        super().__init__()
        self._library, self._file = library, file
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._file.read(2**14)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("the compressed file ends too early")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

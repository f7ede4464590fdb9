"""Compressed files as streams of what is in them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from headway.core.errors import missing_extra
from headway.data.reading.places import SourceFile, open_file

#: Compressions by file ending.
ENDINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_BLOCK, _INPUT = 2**20, 2**14
# As far back as `zstd --long=31` reaches, with which large dumps are written; memory is taken as a file asks for it.
_ZSTD_WINDOW = 2**31
# Compressed bytes that zstd gets at a time.
_FEWEST, _MOST = 64, 2**12
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
            yield _joined(raw, bz2.BZ2Decompressor)
        elif file.compression == "xz":
            yield _joined(raw, lzma.LZMADecompressor, padding=b"\0")
        elif library is not None:
            yield _joined(raw, lambda: _ZstdFrame(library))
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


def _joined(file: BinaryIO, new: Callable[[], Any], padding: bytes = b"") -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Members(file, new, padding), _BLOCK))


class _Members(io.RawIOBase):
    """Decompressed bytes of a file of members, one after the other.

    The standard library's readers take what they cannot read behind the first member for junk that nobody wants, so
    that damage where a member begins would cost all that follow without a word; zstandard's takes a cut file for a
    whole one.

    Args:
        file: The compressed bytes.
        new: Makes what decompresses one member.
        padding: The byte that may stand between members, and behind the last one.
    """

    def __init__(self, file: BinaryIO, new: Callable[[], Any], padding: bytes) -> None:
        super().__init__()
        self._file, self._new, self._padding = file, new, padding
        self._member = new()
        self._begun = False
        self._input, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._go_on():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _go_on(self) -> bool:
        """Decompress a little more; false at the end of the file."""
        data = b""
        if self._member is None or self._member.needs_input:
            data = self._input or self._file.read(_INPUT)
            if not data and self._begun and self._member is not None:
                raise EOFError("the compressed file ends too early")
            if not data:  # a file of no bytes is empty, as an uncompressed one is
                return False
            self._begun = True
        if self._member is None:
            data = self._input = data.lstrip(self._padding)
            if not data:
                return True
            self._member = self._new()
        member = self._member
        self._ready = memoryview(member.decompress(data, _BLOCK))
        self._member, self._input = (None, member.unused_data) if member.eof else (member, b"")
        return True


class _ZstdFrame:
    """Decompresses one zstd frame, with the names that the standard library has for it.

    The library gives back all that some bytes hold, and 4 of them can hold 128 KiB; so it gets few at a time, the fewer
    the more came of those before.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._frame = library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._waiting, self._step = memoryview(b""), _FEWEST

    @property
    def needs_input(self) -> bool:
        """Whether all that was handed over has been decompressed."""
        return not self._waiting

    def decompress(self, data: bytes, most: int) -> bytes:
        """Return what the next bytes hold, about `most` bytes of it; the rest with the next call."""
        self._waiting = memoryview(bytes(self._waiting) + data) if self._waiting else memoryview(data)
        parts, size = [], 0
        while self._waiting and size < most and not self.eof:
            try:
                part = bytes(self._frame.decompress(self._waiting[: self._step]))
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._waiting = self._waiting[self._step :]
            self._step = max(_FEWEST, self._step // 2) if len(part) > most else min(_MOST, 2 * self._step)
            parts.append(part)
            size += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def eof(self) -> bool:
        """Whether the frame has ended."""
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        """What stands behind it."""
        return bytes(self._frame.unused_data) + bytes(self._waiting)

"""Streams of the decompressed content of files."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from headway.core.errors import needing
from headway.text.reading.archives import HEAD_BYTES, check_text
from headway.text.reading.documents import ContentError
from headway.text.reading.places import SourceFile, open_file

#: Compressions by file ending.
ENDINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
_BLOCK = 2**20
_INPUT = 2**14
# The window of `zstd --long=31`, which large dumps use. Memory is allocated only if a file needs it.
_ZSTD_WINDOW = 2**31
# Limits of the compressed bytes passed to zstd at a time.
_FEWEST = 64
_MOST = 2**12
# Exceptions of truncated or damaged compressed streams.
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, ContentError)
# Byte order marks of encodings other than UTF-8, the longer ones first.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


@contextmanager
def open_content(file: SourceFile, start: int = 0, end: int | None = None) -> Iterator[BinaryIO]:
    """Open a file during a block, as a stream of its decompressed bytes; UTF-16 and UTF-32 become UTF-8.

    Args:
        file: The file.
        start: Start of the part to read, for files without compression; see `places.open_file`.
        end: End of that part.

    Raises:
        ConfigError: the file needs zstd, but the extra is not installed.
        DataError: the file cannot be opened.
        Exception: its beginning is damaged, or that of an archive; see `is_damage`.
    """
    library = _zstandard(file.name) if file.compression == "zstd" else None
    with open_file(file, start, end) as raw:
        if file.compression == "gzip":
            content = cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
        elif file.compression == "bz2":
            content = _joined(raw, bz2.BZ2Decompressor)
        elif file.compression == "xz":
            content = _joined(raw, lzma.LZMADecompressor, padding=b"\0")
        elif library is not None:
            content = _joined(raw, lambda: _ZstdFrame(library))
        else:
            content = raw
        yield content if start else _as_utf8(content, file)


def is_transcoded(stream: BinaryIO) -> bool:
    """Return whether a stream of `open_content` is not the file's bytes, but their translation to UTF-8."""
    return isinstance(getattr(stream, "raw", None), _Transcoded)


def _as_utf8(content: BinaryIO, file: SourceFile) -> BinaryIO:
    """Return a stream that begins at a file's first byte as UTF-8, by the byte order mark.

    Raises:
        ContentError: it is an archive.
    """
    head = cast(Any, content).peek(HEAD_BYTES)[:HEAD_BYTES]
    check_text(head, file.location)
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            content.read(len(mark))
            return cast(BinaryIO, io.BufferedReader(_Transcoded(content, encoding), _BLOCK))
    return content


class _Produced(io.RawIOBase):
    """A stream of bytes that a subclass produces block by block."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._produce():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _produce(self) -> bool:
        """Put some bytes into `_ready`; return False at the end."""
        raise NotImplementedError


class _Transcoded(_Produced):
    """The text of a stream as UTF-8.

    Args:
        stream: The bytes, without the byte order mark.
        encoding: A name of the standard library, with the order of bytes.
    """

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        super().__init__()
        self._reader = BlockReader(stream)
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._error: ContentError | None = None

    def _produce(self) -> bool:
        """Decode a block; the text before a fault comes first, and then the error."""
        if self._error is not None:
            raise self._error
        block = self._reader.read(_BLOCK)
        try:
            text = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            self._error = ContentError(f"its mark says {self._encoding}, but it is not: {error.reason}")
            text = error.object[: error.start].decode(self._encoding)
        self._ready = memoryview(text.encode())
        return bool(block) or self._error is not None


class BlockReader:
    """Reads a stream in blocks. It returns data before a damaged place first; a plain `read` would lose that data."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._error: Exception | None = None

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer before a damaged place and at the end.

        Raises:
            Exception: the error at the damaged place; see `is_damage`.
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
    """Return whether an error comes from the content of a file, not from the disk, so that the rest can be skipped."""
    # An OSError that a decompressor raises has no errno.
    return isinstance(error, _DAMAGE) or (isinstance(error, OSError) and error.errno is None)


def _zstandard(name: str) -> Any:
    with needing("zstandard", "zstd", f"reading {name}"):
        import zstandard
    return zstandard


def _joined(file: BinaryIO, new: Callable[[], Any], padding: bytes = b"") -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Members(file, new, padding), _BLOCK))


class _Members(_Produced):
    """Decompressed bytes of a file that consists of several members.

    The standard library's readers ignore unreadable bytes after the first member, so damage at the start of a member
    would silently drop all that follows. The reader of zstandard accepts a truncated file as complete.

    Args:
        file: The compressed bytes.
        new: Creates the decompressor of one member.
        padding: The byte that may stand between members and after the last one.
    """

    def __init__(self, file: BinaryIO, new: Callable[[], Any], padding: bytes) -> None:
        super().__init__()
        self._file = file
        self._new = new
        self._padding = padding
        self._member = new()
        self._begun = False
        self._input = b""

    def _produce(self) -> bool:
        """Decompress some input; return False at the end of the file."""
        data = b""
        if self._member is None or self._member.needs_input:
            data = self._input or self._file.read(_INPUT)
            if not data and self._begun and self._member is not None:
                raise EOFError("the compressed file ends too early")
            if not data:  # an empty compressed file counts as empty content
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
    """Decompressor of one zstd frame, with the interface of the standard library's decompressors.

    The library returns all output of its input at once, and 4 bytes of input can hold 128 KiB. So it gets small inputs,
    smaller ones after a large output.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._frame = library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._waiting = memoryview(b"")
        self._step = _FEWEST

    @property
    def needs_input(self) -> bool:
        """Whether all input so far has been decompressed."""
        return not self._waiting

    def decompress(self, data: bytes, most: int) -> bytes:
        """Return about `most` decompressed bytes; later calls return the rest."""
        self._waiting = memoryview(bytes(self._waiting) + data) if self._waiting else memoryview(data)
        parts = []
        size = 0
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
        """Bytes after the frame."""
        return bytes(self._frame.unused_data) + bytes(self._waiting)

"""Reading what has been appended to a file of JSON lines since the last time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from headway.core.files.foreign import LINE_BYTES, open_regular, parse_json_lines

_BLOCK_BYTES = 256 * 1024


class JsonLinesTail:
    """A cursor in a file of JSON lines: which file, and up to which byte it was read.

    A last line without its end is read when it is complete. A file that was replaced, or that no longer has a line end
    where the cursor is, is read again from its beginning.

    Args:
        path: The file, which need not exist yet.
        newest_bytes: Begin this far before the end; None begins at the beginning.
    """

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self.path = path
        self._newest_bytes = newest_bytes
        self._file: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> Iterator[tuple[bool, list[dict[str, Any]]]]:
        """Yield the new records in blocks, each with whether the file has begun anew, so that earlier ones are void.

        Raises:
            OSError: as `open_regular`; a missing file has no records.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            begins = self._find_place(file)
            while (lines := whole_lines(file, self._offset, _BLOCK_BYTES)).endswith(b"\n"):
                self._offset += len(lines)
                yield begins, list(parse_json_lines(lines[:-1].split(b"\n")))
                begins = False
            if begins and self._offset == 0:
                yield True, []  # it is there, and empty

    def _find_place(self, file: BinaryIO) -> bool:
        """Go to where reading continues; returns whether that is the beginning of another file."""
        found = os.fstat(file.fileno())
        identity = (found.st_dev, found.st_ino)
        if identity == self._file and self._offset <= found.st_size:
            file.seek(max(0, self._offset - 1))
            if self._offset == 0 or file.read(1) == b"\n":
                return False
        is_first = self._file is None
        self._file = identity
        self._offset = 0
        if self._newest_bytes is not None and found.st_size > self._newest_bytes:
            file.seek(found.st_size - self._newest_bytes)
            self._offset = file.tell() + len(file.readline())
        return not is_first


def whole_lines(file: BinaryIO, start: int, size: int, most: int = LINE_BYTES) -> bytes:
    """Return whole lines from a place on, about `size` bytes of them and at most `most`; empty if there is none yet.

    From a line on that is longer than any record they are `most` bytes without a line end.
    """
    most = min(most, LINE_BYTES)
    while True:
        size = min(size, most)
        file.seek(start)
        data = file.read(size)
        cut = data.rfind(b"\n") + 1
        if cut:
            return data[:cut]
        if len(data) < size:
            return b""
        if size == most:
            return data
        size *= 2  # a line that is longer than a block

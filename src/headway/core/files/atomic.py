"""Writes that a kill or a power cut leaves whole: a file or a folder is replaced at once, and records are appended."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from headway.core.credentials.secrets import redact_values
from headway.core.files.foreign import open_regular

# Linux: AT_FDCWD and RENAME_EXCHANGE.
_HERE = -100
_EXCHANGE = 2
# Linux: SYNC_FILE_RANGE_WRITE.
_BEGIN_WRITING = 2
#: Name that `atomic_write` gives a file until it is complete.
_UNFINISHED = re.compile(r"\..+\.([0-9]+)\.tmp")


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut (a file's own fsync does not cover its name)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_flush(descriptor: int, start: int, size: int) -> None:
    """Ask the kernel to start writing a part of a file to disk, so that a later fsync returns sooner.

    Linux only (sync_file_range(2)). The call guarantees nothing, so the fsync is still needed.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _BEGIN_WRITING)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two files or folders atomically, and return whether that was possible.

    Linux only (renameat2(2)), and not on every file system.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_HERE, os.fsencode(one), _HERE, os.fsencode(other))
    return rename is not None and bool(rename(*names, _EXCHANGE) == 0)


def _opened_in_place(path: Path) -> int | None:
    """Open a device or a pipe for writing in place.

    Returns:
        None for a path to be replaced: a regular file, or a FIFO without a reader, where opening would block.
    """
    if not path.exists() or path.is_dir() or (path.is_file() and not path.is_relative_to("/dev")):
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_TRUNC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
    os.set_blocking(descriptor, True)
    return descriptor


@contextmanager
def atomic_write(path: Path, mode: str = "wb", *, private: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file next to `path` and rename it over `path` when the block ends without an error.

    The file and its name are flushed to disk before the block returns, so a reader sees the old content or the whole
    new one. On an error the temporary file is removed and `path` stays unchanged. A link stays a link. A device or a
    pipe (`/dev/null`, `/dev/stdout`) is written in place: other processes need it to stay what it is.

    Args:
        path: The file.
        mode: As for `open`.
        private: Restrict access to the owner before any content is written.
    """
    if (descriptor := _opened_in_place(path)) is not None:
        with os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        return
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _named(path, temporary):
            if private:
                temporary.unlink(missing_ok=True)
                temporary.touch(0o600, exist_ok=False)
        with _named(path, temporary), temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with _named(path, temporary):
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of `atomic_write` whose process was killed."""
    for path in folder.glob(".*.tmp"):
        match = _UNFINISHED.fullmatch(path.name)
        if match and not _is_running(int(match[1])):
            with suppress(OSError):
                path.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def _named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Make an `OSError` of the block name the target file, if it names none or the temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
            error.filename2 = None
        raise


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file atomically, in UTF-8; `private` restricts access to its owner."""
    with atomic_write(path, "w", private=private) as file:
        file.write(text)


def write_json(path: Path, value: Any, *, exact: bool = False) -> None:
    """Write a JSON file atomically, indented for people. Invalid UTF-8 in file names is escaped.

    Args:
        path: The file.
        value: JSON value.
        exact: Do not redact credentials, since the content is compared or computed with later.
    """
    value = value if exact else redact_values(value)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def append_json_line(path: Path, value: Any, *, flush: bool = False) -> None:
    """Append one record to a JSON-lines file with a single write, so a kill never leaves two records mixed.

    Args:
        path: The file.
        value: The record.
        flush: Return only when the record, and the name of a new file, would survive a power cut. A record that cannot
            be flushed is removed again; no other process may append to the file then.
    """
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    is_new = flush and not path.exists()
    with _named(path), open_regular(path, "ab") as file:
        # A kill during a write may have left a line without its end. A new line keeps this record intact.
        if file.tell() and not ends_with_newline(path):
            line = "\n" + line
        append_bytes(file, line.encode("utf-8", "backslashreplace"), flush=flush)
        if is_new:
            sync_folder(path.parent)


def append_bytes(file: BinaryIO, content: bytes, *, flush: bool) -> None:
    """Append to an open file without a buffer.

    Args:
        file: The file.
        content: What to append.
        flush: Flush it to disk, and remove it again if that fails; no other process may append to the file then.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(content)
        while rest:  # a disk that becomes full accepts a part and raises for the rest
            rest = rest[file.write(rest) :]
        if flush:
            os.fsync(file.fileno())
    except OSError:
        if flush:  # network file systems say only here that they are full, and a second try must not add it twice
            with suppress(OSError):
                file.truncate(end)
        raise


def ends_with_newline(path: Path) -> bool:
    """Return whether a file that is not empty ends with a newline."""
    with open_regular(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

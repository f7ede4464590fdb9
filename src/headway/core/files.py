"""Files that are either whole or absent, and hashes of what is in them."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from headway.core.errors import ConfigError
from headway.core.foreign import open_regular
from headway.core.secrets import redact_values

# Linux: AT_FDCWD and RENAME_EXCHANGE.
_HERE, _EXCHANGE = -100, 2
# Linux: SYNC_FILE_RANGE_WRITE.
_BEGIN_WRITING = 2
#: What `atomic_write` calls a file until it is whole.
_UNFINISHED = re.compile(r"\..+\.([0-9]+)\.tmp")


def sha256_bytes(data: bytes | memoryview) -> str:
    """Hex SHA-256 of a buffer."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, most: int | None = None) -> str:
    """Hex SHA-256 of a file of at most so many bytes, read in blocks."""
    with open_regular(path, most=most) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one byte form of a JSON value, for fingerprints: sorted keys, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A file's name may be no UTF-8; what of it is not is written as JSON's own escape.
    return text.encode("utf-8", "backslashreplace")


def fingerprint(value: Any) -> str:
    """Hex SHA-256 of a JSON value's canonical form."""
    return sha256_bytes(canonical_json(value))


def user_cache() -> Path:
    """Where to keep, for this user on this machine, what can be found out again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut (a file's own fsync does not cover its name)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_flush(descriptor: int, start: int, size: int) -> None:
    """Have the system begin to write a part of a file to disk, so that an fsync later on has little left to wait for.

    Only Linux can (sync_file_range(2)), and nothing is promised: the fsync has to come all the same.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _BEGIN_WRITING)


def exchange(one: Path, other: Path) -> bool:
    """Give two files or folders each other's names in one step; whether that was done.

    Only Linux can (renameat2(2)), and not on every file system.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_HERE, os.fsencode(one), _HERE, os.fsencode(other))
    return rename is not None and bool(rename(*names, _EXCHANGE) == 0)


def is_there(path: Path, folders: int = 1) -> bool:
    """Whether a file that another machine may just have made is there.

    A client of NFS remembers for up to a minute that a name was not there. To open a folder has it ask whether that has
    changed (nfs(5), close-to-open consistency).

    Args:
        folders: How many of the folders above the file may be new too.
    """
    for folder in reversed(path.parents[:folders]):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))
    return path.exists()


def is_at(path: Path, descriptor: int) -> bool:
    """Whether what is open has this path, still."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def file_in_memory(name: str) -> tuple[int, Path] | None:
    """Make a file that no disk has, and that is gone with the last process that has it open.

    Returns:
        What is open, and the path by which this user's processes on this machine find it while this process has it
        open; None where there is no such file or path.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    path = Path(f"/proc/{os.getpid()}/fd/{file}")
    with suppress(OSError):
        # Only root could follow it (PR_SET_DUMPABLE), or /proc is of another process namespace.
        if path.parent.stat().st_uid == os.geteuid() and is_at(path, file):
            return file, path
    os.close(file)
    return None


def _opened_in_place(path: Path) -> int | None:
    """A device or a pipe, opened to be written to; None for what is to be replaced: a file, and a FIFO that nobody
    reads, for which one would have to wait."""
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
    """Open a temporary file beside `path` and rename it over `path` when the block ends without an error.

    The file and its name are flushed to disk before the block returns, so a reader sees the old content or the whole
    new one. On an error the temporary file is removed and `path` is left as it was. A link stays one, and a device
    or a pipe (`/dev/null`, `/dev/stdout`) is written to: a file in its place would be missed by all others.

    Args:
        path: The file.
        mode: As `open` has it.
        private: Only the file's owner may read it, from before there is anything in it.
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
    """Remove what `atomic_write` has left in a folder where the process that wrote was killed."""
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
    """Have an error of the system name the file that was to be written, where it names none or the temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


def write_json(path: Path, value: Any, *, exact: bool = False) -> None:
    """Write a JSON file atomically, indented for people. Names of files that are no UTF-8 are spelled out.

    Args:
        exact: Write what was given, character for character, for what others check against it or compute with.
            Otherwise credentials in it are redacted.
    """
    value = value if exact else redact_values(value)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def append_json_line(path: Path, value: Any) -> None:
    """Append one record to a JSON-lines file with a single write, so a kill never leaves two records mixed."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"
    with _named(path), open_regular(path, "ab") as file:
        # A kill in mid-write may have left a line without its end: start a fresh one rather than corrupt this record.
        if file.tell() and not ends_with_newline(path):
            line = "\n" + line
        rest = memoryview(line.encode("utf-8", "backslashreplace"))
        while rest:  # a disk that becomes full takes a part, and says so when it is given the rest
            rest = rest[file.write(rest) :]


def ends_with_newline(path: Path) -> bool:
    """Whether the last byte of a file that is not empty ends a line."""
    with open_regular(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def expanded(path: str | Path, where: str | None = None) -> Path:
    """A path with `~` and `~user` as the shell has them.

    Raises:
        ConfigError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"'{path}' has no meaning here: {error}", where=where, fix="name the folder") from None

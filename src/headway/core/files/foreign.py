"""Safe readers of untrusted files: run directories, checkpoints, stores, configs, vocabularies.

Only regular files are read, up to a size limit for their kind. A FIFO or a device could block or never end, so it is
refused before it is opened. JSON with duplicate keys is refused, and so is JSON that is nested too deeply for recursive
code. Text for people goes through `core.format.printable`.

A problem with a file is an `OSError` whose `strerror` describes it; a problem with its content is a `ValueError`.
Both messages complete a sentence that begins with the file's name ("is not a regular file").
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from headway.core.format import format_bytes, printable

#: Largest file of settings that is read: a config, `run.json`, `tokenizer_config.json`.
SETTINGS_BYTES = 16 * 2**20
#: Largest file that grows with a model, a store or a vocabulary: a manifest, `tokenizer.json`, a safetensors index.
LISTING_BYTES = 256 * 2**20
#: Longest line of a file to which a run appends.
LINE_BYTES = 4 * 2**20
#: Deepest nesting of JSON values.
DEPTH = 100

#: Most values in a long JSON text: Python needs up to 24 bytes of memory for a byte of JSON.
_VALUES = 8_000_000
_SHORT_BYTES = 2 * _VALUES
_BLOCK_BYTES = 256 * 1024
_KINDS = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
_FLAGS = {"rb": os.O_RDONLY, "r+b": os.O_RDWR, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
#: Paths of files that a shell or another process has opened for this one: `headway train <(generate)`.
_HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


class ForeignFileError(OSError):
    """A file that is refused whatever it contains: it is not a regular file, or it is too large."""

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(errno.EINVAL, problem, str(path))
        self.problem = problem


def open_regular(
    path: Path, mode: Literal["rb", "r+b", "ab"] = "rb", *, most: int | None = None, buffering: int | None = None
) -> BinaryIO:
    """Open a regular file, or a link to one.

    Args:
        path: The file.
        mode: As for `open`.
        most: Largest size in bytes.
        buffering: As for `open`. The default buffers reads only.

    Raises:
        OSError: it cannot be opened; `ForeignFileError` if it is not regular or too large.
    """
    if buffering is None:
        buffering = -1 if mode == "rb" else 0
    with suppress(FileNotFoundError):
        _check(path, path.stat(), most)
    # Another process may have put a FIFO in its place since, and opening a FIFO may block forever.
    descriptor = os.open(path, _FLAGS[mode] | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        _check(path, os.fstat(descriptor), most)
        return os.fdopen(descriptor, mode, buffering)
    except BaseException:
        os.close(descriptor)
        raise


def kind_of_file(path: Path) -> str:
    """Return what a path is that is neither a regular file nor a folder: "a FIFO", ..."""
    return _kind(path.stat().st_mode)


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "something else")


def _check(path: Path, found: os.stat_result, most: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ForeignFileError(f"is not a regular file but {_kind(found.st_mode)}", path)
    if most is not None and found.st_size > most:
        raise _too_large(path, most, found.st_size)


def _too_large(path: Path, most: int, size: int | None = None) -> ForeignFileError:
    has = "more than" if size is None else f"{format_bytes(size)}, and at most"
    return ForeignFileError(f"has {has} {format_bytes(most)}{'' if size is None else ' are read'}", path)


def read_bytes(path: Path, most: int = LISTING_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path, most=most) as file:
        return _all_of(file, path, most)


def read_text(path: Path, most: int = SETTINGS_BYTES) -> str:
    """Return the UTF-8 text in a regular file.

    Raises:
        OSError: as `open_regular`.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_given_bytes(path: Path, most: int = SETTINGS_BYTES) -> bytes:
    """Return the content of a file that a person has named on the command line.

    It may be a regular file, or a pipe that the shell has opened for this process, which is read to its end.

    Raises:
        OSError: as `open_regular`.
    """
    if not str(path).startswith(_HANDED_OVER):
        return read_bytes(path, most)
    with path.open("rb") as file:
        return _all_of(file, path, most)


def _all_of(file: IO[bytes], path: Path, most: int) -> bytes:
    content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    # There may be more: a pipe and a file of `/proc` have no size, and a file may grow.
    while len(content) <= most and (more := file.read(_BLOCK_BYTES)):
        content += more
    if len(content) > most:
        raise _too_large(path, most)
    return content


def read_json(path: Path, most: int = SETTINGS_BYTES) -> Any:
    """Return the JSON value in a regular file.

    Raises:
        OSError: as `open_regular`.
        ValueError: as `parse_json`.
    """
    return parse_json(read_bytes(path, most))


def read_json_object(path: Path, most: int = SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object in a regular file.

    Raises:
        OSError: as `open_regular`.
        ValueError: as `parse_json`; it is not an object.
    """
    value = read_json(path, most)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def readable_json_object(path: Path, most: int = SETTINGS_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a regular file; None if there is none that can be read."""
    try:
        return read_json_object(path, most)
    except (OSError, ValueError):
        return None


def read_json_or_empty(path: Path, most: int = LISTING_BYTES) -> dict[str, Any]:
    """Return the JSON object in a regular file; an empty one if there is none that can be read."""
    return readable_json_object(path, most) or {}


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON value as the standard library does, with limits.

    Raises:
        ValueError: it is not JSON, gives a key twice, is nested deeper than `DEPTH`, or has too many values.
    """
    check_number_of_values(text)
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RefusedJson:
        raise
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    check_depth(value, text)
    return value


class RefusedJson(ValueError):
    """A text that is JSON and is refused all the same: a key is given twice, or it is nested too deeply."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RefusedJson(given_twice(repeated_keys(pairs)[0]))
    return found


def repeated_keys(pairs: list[tuple[str, Any]]) -> list[str]:
    """Return the keys that a JSON object gives more than once."""
    return [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def given_twice(key: str) -> str:
    """Return what is wrong with a JSON object that gives a key more than once."""
    return f"gives the key '{printable(key):.80}' twice"


def as_number(value: Any) -> float | None:
    """Return a JSON number as a float; None if the value is not a number or is out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def check_number_of_values(text: bytes | str) -> None:
    """Check that the values of a JSON text would not fill memory; 16 MB of text cannot hold enough of them.

    Raises:
        ValueError: it has too many values.
    """
    if len(text) > _SHORT_BYTES and _count(text, ",", "[", "{") > _VALUES:
        raise ValueError(f"has more than {_VALUES:,} values")


def check_depth(value: Any, text: bytes | str | None = None) -> None:
    """Check that a value is not nested deeper than `DEPTH`, since code that walks through it recurses at every level.

    Args:
        value: The parsed JSON value.
        text: The JSON text. Counting its brackets clears most values without a walk.

    Raises:
        ValueError: it is nested deeper.
    """
    if text is not None and _count(text, "[", "{") <= DEPTH:
        return
    level = [value] if type(value) is dict or type(value) is list else []
    for _ in range(DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if type(node) is dict else node)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RefusedJson:
    return RefusedJson(f"is nested more than {DEPTH} deep")


def _count(text: bytes | str, *signs: str) -> int:
    if isinstance(text, str):
        return sum(map(text.count, signs))
    return sum(text.count(sign.encode()) for sign in signs)


def read_lines(file: IO[bytes], most: int = LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file from its position, without line ends; lines longer than `most` are skipped."""
    rest = b""
    too_long = False
    while block := file.read(_BLOCK_BYTES):
        may_be_too_long = len(rest) + len(block) > most
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if too_long and lines:
            del lines[0]
            too_long = False
        yield from (line for line in lines if len(line) <= most) if may_be_too_long else lines
        if len(rest) > most or too_long:
            rest = b""
            too_long = True
            _pass_over_hole(file)
    if rest:
        yield rest


def _pass_over_hole(file: IO[bytes]) -> None:
    """Seek past a hole of a sparse file: one call can make a file a terabyte long."""
    seek_data = getattr(os, "SEEK_DATA", None)
    if seek_data is None:
        return
    try:
        place = os.lseek(file.fileno(), file.tell(), seek_data)
    except OSError as error:
        if error.errno != errno.ENXIO:
            return
        place = os.fstat(file.fileno()).st_size  # nothing but a hole is left
    file.seek(place)


def read_end(path: Path, most: int) -> tuple[bytes, int]:
    """Return the whole lines in the last `most` bytes of a file that may grow, and its size.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - most)
        file.seek(start)
        data = file.read(most)
    return data.partition(b"\n")[2] if start else data, size


def parse_json_lines(
    lines: Iterable[bytes], refused: Callable[[RefusedJson], None] = lambda problem: None
) -> Iterator[dict[str, Any]]:
    """Yield the objects in lines of JSON; a line without an object, or one that `parse_json` refuses, is skipped.

    Args:
        lines: The lines.
        refused: Called for each line that no kill has cut off: it is JSON, and `parse_json` refuses it.
    """
    from orjson import loads

    for line in lines:
        # orjson is several times faster than `parse_json` but allows duplicate keys and deep nesting. As many colons as
        # keys rule out a duplicate, and few brackets rule out deep nesting.
        try:
            record = loads(line)
        except ValueError:
            record = None
        if type(record) is not dict or line.count(b":") != len(record) or line.count(b"[") + line.count(b"{") > DEPTH:
            try:
                record = parse_json(line)
            except RefusedJson as problem:
                refused(problem)
                continue
            except ValueError:
                continue
        if isinstance(record, dict):
            yield record


def read_json_lines(
    path: Path, refused: Callable[[RefusedJson], None] = lambda problem: None
) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines; a line cut off by a kill is skipped. A missing file has none.

    Args:
        path: The file.
        refused: As in `parse_json_lines`.

    Raises:
        OSError: as `open_regular`, except for a missing file.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        yield from parse_json_lines(read_lines(file), refused)

"""Places of input files: on this machine or behind a URL of `fsspec`, listed and opened in the same way."""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.core.errors import DataError
from headway.core.files.foreign import kind_of_file, open_regular
from headway.core.files.paths import expanded
from headway.core.storage import scheme_of
from headway.data.storage import DataStorage
from headway.data.store import INPUTS, SKIPPED

STDLIB = "stdlib:"
# Third-party code is not part of the standard library.
_STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__"}
_BLOCK = 2**20

#: Device and inode of nested folders, outermost first.
_Folders = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """A file that a source's path refers to."""

    location: str
    """Local path or URL."""
    name: str
    """Path relative to its source, with forward slashes; independent of the place of the source."""
    bytes: int
    local: bool = True
    version: str | None = None
    """Version of the content by a remote store: a checksum, or size and modification time. None if the store reports
    neither, and for local files."""
    ranges: bool = True
    """Whether it can be read from any offset; some web servers do not support that."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Storage options for `fsspec`. Never shown, since they may contain secrets."""

    @property
    def path(self) -> Path:
        """A local file's path."""
        return Path(self.location)


@dataclass(frozen=True)
class SourceFile(Place):
    """One input file."""

    format: str = "text"
    """text, jsonl, csv, parquet, arrow, or stream for a source without files."""
    compression: str | None = None
    """gzip, zstd, bz2, xz or None."""
    delimiter: str = ","
    """What separates the columns of a CSV file."""
    delimiter_given: bool = field(default=False, compare=False)
    """Whether the config says so."""
    field: str | None = None
    """Field of its text where that was found in the file; None for the source's."""


@dataclass(frozen=True)
class Listing:
    """Files that a path refers to."""

    places: list[Place]
    """Sorted by name."""
    kind: str
    """file, folder, glob or nothing."""


def is_remote(path: str) -> bool:
    """Return whether a path is a URL that needs `fsspec`."""
    return scheme_of(path) not in (None, "file", "local")


def list_places(
    path: str,
    options: Mapping[str, Any],
    wanted: Callable[[str], bool] = lambda name: True,
    excluded: Callable[[str], bool] = lambda name: False,
) -> Listing:
    """List the files that a path, glob, folder or URL refers to.

    Args:
        path: The path.
        options: Storage options for `fsspec`.
        wanted: Whether a file of this name will be read; others are listed even if they cannot be.
        excluded: Whether a file or folder of this name is left out of a folder or glob, whatever it is.

    Raises:
        ConfigError: a package that the URL needs is not installed.
        DataError: a local file cannot be read, or a remote place cannot be reached.
    """
    if is_remote(path):
        kind, found = DataStorage(path, options).find()
        places = [Place(f.url, f.name, f.bytes, False, f.version, f.ranges, options) for f in found]
        places = [place for place in places if kind == "file" or not excluded(place.name)]
    else:
        kind, local = _local(path.removeprefix(f"{scheme_of(path)}://"), excluded)
        named = [(found, unicode_name(name)) for found, name in local]
        named = [(found, name) for found, name in named if kind == "file" or not excluded(name)]
        places = [
            Place(str(found), name, _size(found) if wanted(name) else _listed_size(found)) for found, name in named
        ]
    return Listing(sorted(places, key=lambda place: place.name), kind)


def unicode_name(name: str) -> str:
    """Return a file's name as valid Unicode, with escapes for bytes that are not UTF-8, as in old archives."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _local(path: str, excluded: Callable[[str], bool]) -> tuple[str, Iterator[tuple[Path, str]]]:
    """Return the kind of a local path, and its files with their names relative to it."""
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        # Skip empty files, such as the `__init__.py` of some packages, so that they cause no warning.
        found = ((p, n) for p, n in _walk(root, without=_STDLIB_WITHOUT) if p.suffix == ".py" and p.stat().st_size)
        return "folder", found
    place = expanded(path)
    if place.is_dir():
        return "folder", _walk(place, excluded=excluded)
    if place.is_file() or _is_broken_link(place):
        return "file", iter([(place, place.name)])
    if glob.has_magic(path):
        return "glob", _matches(place)
    if place.exists():
        what = f"it is {kind_of_file(place)}, whose bytes come once, and an input may be read several times"
        raise DataError(what, where=path, fix="write it to a file, or name a function: python:MODULE:FUNCTION")
    return "nothing", iter(())


def _matches(pattern: Path) -> Iterator[tuple[Path, str]]:
    wild = next(number for number, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:wild])
    for match in _matching(root, pattern.parts[wild:]):
        if _is_broken_link(match) or (match.is_file() and not _is_skipped_list(match)):
            yield match, match.relative_to(root).as_posix()


def _matching(folder: Path, parts: Sequence[str], above: _Folders = ()) -> Iterator[Path]:
    """Yield the paths below a folder that match a pattern; hidden ones only if the pattern names them.

    The glob of the standard library would follow symlink loops.

    Args:
        folder: Folder to search.
        parts: Pattern of each path component; `**` matches any number of folders.
        above: Device and inode of the folders that the same `**` has entered.
    """
    if not folder.is_dir():
        return
    part = parts[0]
    rest = parts[1:]
    if not glob.has_magic(part):
        yield from _matching(folder / part, rest) if rest else [folder / part]
        return
    try:
        down = _one_further(folder, above)
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise unreadable(str(folder), error, "make it readable, or leave it out") from None
    if down is None:
        return
    if not part.startswith("."):
        names = [name for name in names if not name.startswith(".")]
    if part != "**":
        for name in fnmatch.filter(names, part):
            yield from _matching(folder / name, rest) if rest else [folder / name]
        return
    if rest:
        yield from _matching(folder, rest)
    for name in names:
        if not rest:
            yield folder / name
        yield from _matching(folder / name, parts, down)


def _walk(
    folder: Path,
    inside: str = "",
    without: AbstractSet[str] = frozenset(),
    above: _Folders = (),
    excluded: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder, except hidden ones. Links are followed unless they lead to an enclosing folder.

    Args:
        folder: Folder to search.
        inside: Prefix of the yielded names.
        without: Names of folders to skip.
        above: Device and inode of the enclosing folders.
        excluded: Whether a folder of this name is not entered.
    """
    try:
        down = _one_further(folder, above)
        entries = [(entry.name, *_kind(entry)) for entry in os.scandir(folder) if not entry.name.startswith(".")]
    except OSError as error:
        raise unreadable(str(folder), error, "make it readable, or leave it out") from None
    if down is None:
        return
    for name, is_folder, is_file in sorted(entries):
        if is_folder and name not in without and not excluded(unicode_name(f"{inside}{name}")):
            yield from _walk(folder / name, f"{inside}{name}/", without, down, excluded)
        elif is_file and not _is_skipped_list(folder / name):
            yield folder / name, f"{inside}{name}"


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Return whether an entry is a folder, and whether it is a file or a broken link; neither for a socket."""
    if not entry.is_symlink():
        return entry.is_dir(), entry.is_file()
    path = Path(entry.path)  # unlike an entry, it answers for links in a circle too
    return path.is_dir(), path.is_file() or not path.exists()


def _one_further(folder: Path, above: _Folders) -> _Folders | None:
    """Return `above` with this folder appended; None if the folder is among them, because a link led back to it."""
    stat = folder.stat()
    here = (stat.st_dev, stat.st_ino)
    return None if here in above else (*above, here)


def _is_broken_link(path: Path) -> bool:
    """Return whether a path is a link that leads nowhere, or in a circle.

    It counts as a missing file, which is an error if it would be read, not as one to skip.
    """
    return path.is_symlink() and not path.exists()


def _is_skipped_list(path: Path) -> bool:
    """Return whether a file is a token store's list of skipped documents; a store may lie in its own source folder."""
    return path.name == SKIPPED and (path.parent / INPUTS).exists()


def _size(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(str(path), error, "make it readable, or leave it out") from None


def _listed_size(path: Path) -> int:
    """Return the size of a file that is not read; 0 if that is not known."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_file(file: Place, start: int = 0, end: int | None = None) -> BinaryIO:
    """Open a file as a stream of its raw bytes, without decompression.

    Args:
        file: The file.
        start: Start of the part to read, a hint for fetching remote files. The stream begins at byte 0 all the same.
        end: End of that part; the end of the file if None.

    Returns:
        A stream, seekable if `file.ranges`. Reading raises a `DataError` if a remote file cannot be reached, is gone,
        or is shorter than when it was listed.

    Raises:
        DataError: the file cannot be opened.
    """
    if file.local:
        try:
            return open_regular(file.path, buffering=_BLOCK)
        except OSError as error:
            raise unreadable(file.location, error) from None
    storage = DataStorage(file.location, file.options)
    raw = storage.open("", file.bytes, ranges=file.ranges, start=start, end=end)
    return cast(BinaryIO, io.BufferedReader(raw, _BLOCK))


def stamp_of(file: Place) -> str:
    """Return a stamp that changes when a file changes, to detect writes during reading.

    Raises:
        DataError: the file no longer exists.
    """
    if not file.local:
        now = DataStorage(file.location, file.options).describe()
        return f"{now.bytes}:{now.version}"
    try:
        stat = file.path.stat()
    except OSError as error:
        raise unreadable(file.location, error) from None
    # The change time (ctime), unlike the modification time, cannot be set back.
    return f"{stat.st_size}:{stat.st_ctime_ns}:{stat.st_ino}"


def unreadable(where: str, error: OSError, fix: str = "check data.sources") -> DataError:
    """Return the error for a file that cannot be read."""
    reason = error.strerror or str(error)
    if Path(where).is_symlink():
        reason += f" (a link to {Path(where).readlink()})"
    return DataError(f"an input file cannot be read: {reason}", where=where, fix=fix)

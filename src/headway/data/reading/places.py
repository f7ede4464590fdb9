"""Where input files lie: on this machine, or behind a URL that `fsspec` knows; listed and opened alike."""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.core.errors import DataError
from headway.core.files import expanded
from headway.core.foreign import open_regular
from headway.core.object_storage import scheme_of
from headway.data.reading import remote
from headway.data.store import INPUTS, SKIPPED

STDLIB = "stdlib:"
# Third-party code is not the standard library's own text.
_STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__"}
_BLOCK = 2**20

#: Device and inode of folders, one below the other.
_Folders = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """A file that a source's path means."""

    location: str
    """Local path or URL."""
    name: str
    """Path relative to its source, with forward slashes: the same wherever the source lies."""
    bytes: int
    local: bool = True
    version: str | None = None
    """What a remote store tells of its content: a checksum, or size and time of change; None when it tells nothing, and
    for local files."""
    ranges: bool = True
    """Whether it can be read from the middle; some web servers cannot."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What `fsspec` needs to reach it. Never shown: it may hold what should stay secret."""

    @property
    def path(self) -> Path:
        """A local file's path."""
        return Path(self.location)


@dataclass(frozen=True)
class SourceFile(Place):
    """One input file."""

    format: str = "text"
    """text, jsonl, csv, parquet, arrow, or stream for what is no file."""
    compression: str | None = None
    """gzip, zstd, bz2, xz or None."""


@dataclass(frozen=True)
class Listing:
    """What a path means."""

    places: list[Place]
    """Sorted by name."""
    kind: str
    """file, folder, glob or nothing."""


def is_remote(path: str) -> bool:
    """Whether `fsspec` has to be asked for it."""
    return scheme_of(path) not in (None, "file", "local")


def list_places(path: str, options: Mapping[str, Any]) -> Listing:
    """The files that a path, glob, folder or URL means.

    Raises:
        ConfigError: a package that the URL needs is not installed.
        DataError: a local file cannot be read, or a remote place cannot be reached.
    """
    if is_remote(path):
        kind, found = remote.list_files(path, options)
        places = [Place(f.url, f.name, f.bytes, False, f.version, f.ranges, options) for f in found]
    else:
        kind, local = _local(_without_scheme(path))
        places = [Place(str(found), unicode_name(name), _size(found)) for found, name in local]
    return Listing(sorted(places, key=lambda place: place.name), kind)


def unicode_name(name: str) -> str:
    """A file's name as it can be written down: bytes of it that are no UTF-8, as archives of other days have them, are
    spelled out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _without_scheme(path: str) -> str:
    scheme = scheme_of(path)
    return path.removeprefix(f"{scheme}://") if scheme else path


def _local(path: str) -> tuple[str, Iterator[tuple[Path, str]]]:
    """What kind of local place a path is, and its files with their names relative to it."""
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        # Some packages' `__init__.py` are empty, which is no reason for a warning.
        found = ((p, n) for p, n in _walk(root, without=_STDLIB_WITHOUT) if p.suffix == ".py" and p.stat().st_size)
        return "folder", found
    place = expanded(path)
    if place.is_dir():
        return "folder", _walk(place)
    if place.is_file():
        return "file", iter([(place, place.name)])
    if glob.has_magic(path):
        return "glob", _matches(place)
    return "nothing", iter(())


def _matches(pattern: Path) -> Iterator[tuple[Path, str]]:
    wild = next(number for number, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:wild])
    for match in _matching(root, pattern.parts[wild:]):
        if _leads_nowhere(match) or (match.is_file() and not _of_a_store(match)):
            yield match, match.relative_to(root).as_posix()


def _matching(folder: Path, parts: Sequence[str], above: _Folders = ()) -> Iterator[Path]:
    """Paths below a folder that a pattern means, part by part, but hidden ones that it does not ask for. Those of the
    standard library follow links that go round in circles.

    Args:
        folder: Where to look.
        parts: What each part of the path is like; `**` is any number of folders.
        above: Device and inode of the folders that the same `**` has gone through.
    """
    if not folder.is_dir():
        return
    part, rest = parts[0], parts[1:]
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
    folder: Path, inside: str = "", without: AbstractSet[str] = frozenset(), above: _Folders = ()
) -> Iterator[tuple[Path, str]]:
    """Files below a folder but hidden ones and those in folders named in `without`; links are followed, unless they
    lead to a folder that they are in.

    Args:
        folder: Where to look.
        inside: What stands before the names of what is there.
        without: Names of folders that are passed over.
        above: Device and inode of the folders on the way here.
    """
    try:
        down = _one_further(folder, above)
        entries = [
            (entry.name, entry.is_dir(), entry.is_file() or _leads_nowhere(Path(entry.path)))
            for entry in os.scandir(folder)
            if not entry.name.startswith(".")
        ]
    except OSError as error:
        raise unreadable(str(folder), error, "make it readable, or leave it out") from None
    if down is None:
        return
    for name, is_folder, is_file in sorted(entries):
        if is_folder and name not in without:
            yield from _walk(folder / name, f"{inside}{name}/", without, down)
        elif is_file and not _of_a_store(folder / name):
            yield folder / name, f"{inside}{name}"


def _one_further(folder: Path, above: _Folders) -> _Folders | None:
    """The folders on the way, this one included; None where it is one of them, and a link has led back."""
    stat = folder.stat()
    here = (stat.st_dev, stat.st_ino)
    return None if here in above else (*above, here)


def _leads_nowhere(path: Path) -> bool:
    """Whether a path is a link to what is not there: a file that is gone, not one to pass over."""
    return path.is_symlink() and not path.exists()


def _of_a_store(path: Path) -> bool:
    """Whether it lists what was left out of a token store, which may lie in the folder of its own sources."""
    return path.name == SKIPPED and (path.parent / INPUTS).exists()


def _size(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise unreadable(str(path), error, "make it readable, or leave it out") from None


def open_file(file: Place, start: int = 0, end: int | None = None) -> BinaryIO:
    """A file's bytes as they are, compressed ones not decompressed.

    Args:
        file: What to open.
        start: The part that is about to be read; the file opens at its beginning all the same. Remote files are fetched
            accordingly.
        end: Its end, the file's when None.

    Returns:
        A stream that can seek when `file.ranges`; reading it raises a `DataError` when a remote file cannot be reached,
        is gone, or is shorter than it was when it was listed.

    Raises:
        DataError: the file cannot be opened.
    """
    if file.local:
        try:
            return open_regular(file.path, buffering=_BLOCK)
        except OSError as error:
            raise unreadable(file.location, error) from None
    raw = remote.open_remote(file.location, file.options, file.bytes, ranges=file.ranges, start=start, end=end)
    return cast(BinaryIO, io.BufferedReader(raw, _BLOCK))


def stamp_of(file: Place) -> str:
    """Something that changes when a file changes, to notice one that is written while it is read.

    Raises:
        DataError: the file is not there any more.
    """
    if not file.local:
        now = remote.describe(file.location, file.options)
        return f"{now.bytes}:{now.version}"
    try:
        stat = file.path.stat()
    except OSError as error:
        raise unreadable(file.location, error) from None
    # The inode's time of change, unlike the content's, is one that nobody can put back.
    return f"{stat.st_size}:{stat.st_ctime_ns}:{stat.st_ino}"


def unreadable(where: str, error: OSError, fix: str = "check data.sources") -> DataError:
    """The error for a file that the system does not let us read."""
    reason = error.strerror or str(error)
    return DataError(f"an input file cannot be read: {reason}", where=where, fix=fix)

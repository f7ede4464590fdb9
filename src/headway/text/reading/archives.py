"""Files that hold other files or pages instead of text, known by their first bytes, and what turns them into text."""

from __future__ import annotations

import shlex
import tarfile
from pathlib import PurePosixPath

from headway.text.reading.documents import ContentError

#: Bytes at the beginning of a file that tell what it is: a tar archive has its mark in the first 512.
HEAD_BYTES = 512

_TAR = "a tar archive"
_WEB = "a web archive (WARC)"
_BEGINNINGS = {
    b"PK\x03\x04": "a ZIP archive",
    b"PK\x05\x06": "a ZIP archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"WARC/0.": _WEB,
    b"WARC/1.": _WEB,
    b"%PDF-": "a PDF",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\0": "compressed by xz",
}
_COMMANDS = {
    "a ZIP archive": "unzip -d {folder} {file}",
    "a 7z archive": "7z x -o{folder} {file}",
    "a RAR archive": "unrar x {file} {folder}/",
    _TAR: "mkdir {folder} && tar -C {folder} -xf {file}",
    "a PDF": "pdftotext {file}",
    "compressed by gzip": "mv {file} {file}.gz",
    "compressed by zstd": "mv {file} {file}.zst",
    "compressed by xz": "mv {file} {file}.xz",
}
_ENDINGS = {
    ".zip": "a ZIP archive",
    ".7z": "a 7z archive",
    ".rar": "a RAR archive",
    ".tar": _TAR,
    ".tgz": _TAR,
    ".tbz2": _TAR,
    ".txz": _TAR,
    ".warc": _WEB,
    ".wet": _WEB,
    ".wat": _WEB,
    ".pdf": "a PDF",
}


def check_text(head: bytes, location: str) -> None:
    """Check that the first bytes of a file, unpacked if it is compressed, are not those of an archive or a PDF.

    Raises:
        ContentError: they are.
    """
    what = next((name for beginning, name in _BEGINNINGS.items() if head.startswith(beginning)), None)
    if what is None and _is_tar(head):
        what = _TAR
    if what is not None:
        raise ContentError(f"the file is {what}, not text", unpacking(location, what))


def archive_named(name: str) -> str | None:
    """Return what a file is by its ending: a tar archive, a PDF, ...; None for others. It may be compressed."""
    endings = [ending.lower() for ending in PurePosixPath(name).suffixes[-2:]]
    return next((_ENDINGS[ending] for ending in reversed(endings) if ending in _ENDINGS), None)


def unpacking(location: str, what: str) -> str:
    """Return how to turn a file of a kind into text: a command, where there is one."""
    command = _COMMANDS.get(what)
    if command is None:
        return "yield the text of its pages from a function, as the documentation of sources shows (Web archives)"
    name = PurePosixPath(location).name
    folder = name.split(".")[0] or "unpacked"
    return command.format(file=shlex.quote(location), folder=shlex.quote(folder)) + ", and name what comes of it"


def _is_tar(head: bytes) -> bool:
    """Return whether a block is the header of a file in a tar archive: the checksum in it is right."""
    if len(head) < HEAD_BYTES or b"\0" not in head:
        return False
    try:
        tarfile.TarInfo.frombuf(head[:HEAD_BYTES], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True

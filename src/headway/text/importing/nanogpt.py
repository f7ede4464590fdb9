"""Flat files of ids: nanoGPT's `train.bin` and `val.bin`, and those of llm.c and modded-nanogpt, which have a header.

nanoGPT (`data/openwebtext/prepare.py`): uint16, each document followed by the end-of-text token. llm.c
(`dev/data/data_common.py`): 256 little-endian int32 (magic, version, number of tokens, zeros), then the ids: magic
20240520 and version 1 for uint16, 20240801 and 7 for uint32. There each document begins with the token, and a document
that does not fit into a file continues in the next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import ConfigError, DataError
from headway.core.files.paths import expanded
from headway.text.importing.files import ImportSource, TokenFile, check_not_wider, damaged, read_beginning, size_of

_HEADER_BYTES = 1024
#: By magic: the supported version, and the type of the ids.
_HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_OTHER_MAGIC = {20240522: "llm.c's evaluation data", 20240326: "an llm.c model"}
_HELD_OUT = re.compile(r"(?:^|[^a-z])(?:val|valid|validation)(?:[^a-z]|$)")


def find(paths: Sequence[str], dtype: np.dtype[Any], given: str | None = None) -> list[ImportSource]:
    """Find one source for each folder, and one for all files given individually.

    A file whose name contains the word `val`, `valid` or `validation` is for validation. Files of a source are in the
    order of their names.

    Args:
        paths: Files and folders; a folder stands for all `*.bin` in it.
        dtype: Type of the ids in files without a header, derived from the vocabulary; other files raise an error.
        given: Type of the ids, `uint16` or `uint32`, if the user gave it.

    Raises:
        ConfigError: another type was given.
        DataError: a file is missing, cannot be read, or is damaged, or its ids are of another type.
    """
    if given is not None:
        if given not in ("uint16", "uint32"):
            raise ConfigError(f"ids are not of type '{given}'", where="--dtype", fix="uint16 or uint32")
        dtype = np.dtype(given).newbyteorder("<")
    places = [expanded(path) for path in paths]
    sources = []
    for folder in (place for place in places if place.is_dir()):
        files = [file for file in folder.glob("*.bin") if file.is_file()]
        if not files:
            raise DataError("no *.bin file is in this folder", where=str(folder), fix="check the path")
        sources.append(_source(folder.resolve().name, files, dtype, given is not None))
    single = [place for place in places if not place.is_dir()]
    if single:
        sources.append(_source(_common_name(single), single, dtype, given is not None))
    return sources


def _source(name: str, files: Sequence[Path], dtype: np.dtype[Any], given: bool) -> ImportSource:
    ordered = sorted(files, key=lambda file: file.name)
    held_out = [file for file in ordered if _HELD_OUT.search(file.stem.lower())]
    train = [file for file in ordered if file not in held_out]
    of_training, of_validation = (
        tuple(open_file(file, dtype, given=given) for file in part) for part in (train, held_out)
    )
    return ImportSource(name, of_training, of_validation)


def _common_name(files: Sequence[Path]) -> str:
    """Return the common prefix of the names of files, or their folder's name."""
    stems = [file.stem for file in files]
    same = 0
    while same < min(map(len, stems)) and len({stem[same] for stem in stems}) == 1:
        same += 1
    name = re.sub(r"[^a-zA-Z]*(?:train|val)?[^a-zA-Z]*$", "", stems[0][:same])
    return name or files[0].resolve().parent.name


def open_file(path: Path, dtype: np.dtype[Any], *, given: bool = False) -> TokenFile:
    """Open a file, and check its length.

    Args:
        path: The file.
        dtype: Type of its ids if it has no header.
        given: Whether the user gave the type; otherwise a file that seems to have another type raises an error.

    Raises:
        DataError: see `find`.
    """
    size = size_of(path)
    beginning = read_beginning(path, _HEADER_BYTES)
    head = np.frombuffer(beginning[:12].ljust(12, b"\0"), dtype="<i4")
    magic, version, count = (int(value) for value in head)
    if magic in _OTHER_MAGIC and size >= _HEADER_BYTES and version in range(1, 10):
        raise DataError(f"this is {_OTHER_MAGIC[magic]}, not text", where=str(path), fix="leave it out")
    if magic not in _HEADERS or size < _HEADER_BYTES:
        if size % dtype.itemsize:
            raise damaged(path, f"{size:,} bytes are not a whole number of {dtype.name} ids")
        if not given and dtype.itemsize == 2 and size % 4 == 0:
            check_not_wider(path, beginning, "--dtype uint32 (or --dtype uint16, if every second id really is 0)")
        return TokenFile(path, dtype, 0, size // dtype.itemsize)
    known, kind = _HEADERS[magic]
    if version != known:
        raise DataError(
            f"the header has version {version}; for files that begin with {magic}, only {known} is supported",
            where=str(path),
            fix="write it again with that version",
        )
    own = np.dtype(kind)
    if size != _HEADER_BYTES + count * own.itemsize:
        expected = _HEADER_BYTES + count * own.itemsize
        raise damaged(path, f"{size:,} bytes, but its header says {expected:,} ({count:,} tokens)")
    return TokenFile(path, own, _HEADER_BYTES, count, continues=True)


def check_something_to_train(sources: Sequence[ImportSource]) -> None:
    """Check that not all files of a source are for validation.

    Raises:
        ConfigError: all files are for validation by their names.
    """
    for source in sources:
        if source.validation and not source.train:
            raise ConfigError(
                "by its name this file is for validation, but there is no training file",
                where=str(source.validation[0].path),
                fix="name the training files too, or the folder that has both",
            )

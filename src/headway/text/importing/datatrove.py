"""datatrove's tokenized files: `<name>.ds` with the ids, `<name>.ds.index` with the ends of documents.

The format is that of `datatrove.pipeline.tokens`. Ids are little-endian uint16 or uint32. The index has the ends in
tokens, as little-endian uint64. The first line of `<name>.ds.metadata` has the tokenizer and the bytes of an id
(`gpt2|2`), the second line has the number of tokens. Index and metadata may be missing. A store cannot hold loss masks
(`<name>.ds.loss`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.console import warning
from headway.core.errors import DataError
from headway.core.files.foreign import read_text
from headway.core.files.paths import expanded
from headway.text.importing.files import (
    BLOCK_DOCUMENTS,
    Ends,
    ImportSource,
    TokenFile,
    check_not_wider,
    damaged,
    read_beginning,
    size_of,
)

_ENDING = ".ds"
# Bytes by which the width of ids is checked that no other file records.
_BEGINNING = 1024
# Name that the writer uses for an unknown tokenizer.
_UNKNOWN = "Unknown Tokenizer"


def find(paths: Sequence[str], dtype: np.dtype[Any] | None) -> list[ImportSource]:
    """Find one source for each path, with its files in the order of their paths.

    Args:
        paths: `.ds` files, or folders with `.ds` files at any depth.
        dtype: Type of the ids in files without index and metadata; None if it is not known yet.

    Raises:
        DataError: a file is missing, cannot be read, or is damaged.
    """
    sources = []
    for path in paths:
        place = expanded(path)
        if not place.is_dir():
            sources.append(ImportSource(place.name.removesuffix(_ENDING), (open_file(place, dtype),)))
            continue
        files = sorted(file for file in place.rglob(f"*{_ENDING}") if file.is_file())
        if not files:
            raise DataError(f"no *{_ENDING} file is below this folder", where=str(place), fix="check the path")
        sources.append(ImportSource(place.resolve().name, tuple(open_file(file, dtype) for file in files)))
    return sources


@dataclass(frozen=True)
class _Metadata:
    tokenizer: str | None
    width: int | None
    tokens: int | None


def open_file(path: Path, dtype: np.dtype[Any] | None) -> TokenFile:
    """Open a file, and check it against its metadata and its index if they exist.

    Raises:
        DataError: see `find`.
    """
    size = size_of(path)
    about = _companion(path, "metadata")
    index = _companion(path, "index")
    facts = _metadata(about) if about.exists() else _Metadata(None, None, None)
    indexed = _last_end(index) if index.exists() else None
    known = indexed if indexed is not None else facts.tokens
    width = facts.width or (size // known if known else None) or (dtype.itemsize if dtype is not None else 2)
    if width not in (2, 4):
        raise damaged(path, f"{size:,} bytes for {known:,} tokens are neither 2 nor 4 bytes per token")
    if known is None and facts.width is None and width == 2 and size % 4 == 0:
        fix = "put the file's .ds.metadata or .ds.index back beside it"
        check_not_wider(path, read_beginning(path, _BEGINNING), fix)
    tokens, rest = divmod(size, width)
    for count, where in ((indexed, index), (facts.tokens, about)):
        if rest or (count is not None and count != tokens):
            by = f", but {where.name} says {count:,}" if count is not None else ""
            raise damaged(path, f"{size:,} bytes are {size / width:,.1f} tokens of {width} bytes{by}")
    if _companion(path, "loss").exists():
        warning(f"{path}: the loss mask ({path.name}.loss) is not imported: all tokens will count for the loss")
    return TokenFile(
        path,
        np.dtype("<u2" if width == 2 else "<u4"),
        0,
        tokens,
        ends=partial(_ends, index) if indexed is not None else None,
        companions=tuple(file for file in (index, about) if file.exists()),
        tokenizer=facts.tokenizer,
    )


def _companion(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _metadata(path: Path) -> _Metadata:
    try:
        lines = read_text(path).splitlines()
        name, _, width = lines[0].rpartition("|")
        facts = _Metadata(name or None, int(width), int(lines[1]))
    except (OSError, ValueError, IndexError):
        raise damaged(path, "its lines are not 'tokenizer|bytes' and the number of tokens") from None
    return _Metadata(None, facts.width, facts.tokens) if name.startswith(_UNKNOWN) else facts


def _last_end(index: Path) -> int:
    size = size_of(index)
    if size % 8:
        raise damaged(index, f"{size:,} bytes are not a multiple of 8, the bytes of an entry")
    return int(np.fromfile(index, dtype="<u8", offset=size - 8)[0]) if size else 0


def _ends(index: Path) -> Ends:
    """Yield the ends of documents, in tokens, in blocks."""
    previous = 0
    size = size_of(index) // 8
    for first in range(0, size, BLOCK_DOCUMENTS):
        count = min(BLOCK_DOCUMENTS, size - first)
        ends = np.fromfile(index, dtype="<u8", count=count, offset=8 * first).astype(np.int64)
        if (np.diff(ends, prepend=previous) < 0).any():
            raise damaged(index, "its documents are not in order")
        previous = int(ends[-1])
        yield ends

"""Paragraphs: blocks of text between blank lines."""

from __future__ import annotations

import hashlib
import re

import numpy as np
from numpy.typing import NDArray

# One or more blank lines, which may hold spaces; what follows a paragraph belongs to it.
_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")


def split_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each with the blank lines that follow it (the first one with those before it, too), so
    that joined they are the text."""
    begins = len(text) - len(text.lstrip())
    ends = [match.end() for match in _BLANK.finditer(text) if match.end() > begins]
    if not ends or ends[-1] != len(text):
        ends.append(len(text))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def hash_paragraphs(text: str, least_bytes: int) -> list[int]:
    """One 64-bit number for each paragraph, of its text without spaces at its ends; 0 for those that are too short.

    Args:
        text: The document.
        least_bytes: Paragraphs of fewer bytes (UTF-8, spaces at the ends not counted) are left alone.
    """
    hashes = []
    for paragraph in split_paragraphs(text):
        content = paragraph.strip().encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(content).digest()[:8] if len(content) >= least_bytes else b""
        # A hash of 0, once in 2^64, leaves the paragraph alone too.
        hashes.append(int.from_bytes(digest, "big"))
    return hashes


def drop_paragraphs(text: str, keep: NDArray[np.bool_]) -> str:
    """A document without the paragraphs that are not kept, and without blank lines that would end it.

    Args:
        text: The document, as it was when it was fingerprinted.
        keep: bool (paragraphs,), this document's part of `Duplicates.paragraph_keep`.

    Returns:
        The text itself when every paragraph is kept; an empty text when none is.

    Raises:
        ValueError: the text has another number of paragraphs.
    """
    paragraphs = split_paragraphs(text)
    if len(paragraphs) != len(keep):
        raise ValueError(f"the document has {len(paragraphs)} paragraphs, not {len(keep)}")
    if bool(keep.all()):
        return text
    kept = [paragraph for paragraph, is_kept in zip(paragraphs, keep.tolist(), strict=True) if is_kept]
    if kept and not keep[-1]:
        # The blank lines after the last one led to a paragraph that is gone.
        content = kept[-1].rstrip()
        kept[-1] = content + kept[-1][len(content) :].partition("\n")[0]
    return "".join(kept)

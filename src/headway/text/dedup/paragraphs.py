"""Paragraphs: blocks of text between blank lines."""

from __future__ import annotations

import hashlib
import re

import numpy as np
from numpy.typing import NDArray

# One or more blank lines, which may contain spaces. They belong to the paragraph before them.
_BLANK = re.compile(r"\n(?:[^\S\n]*\n)+")


def split_paragraphs(text: str) -> list[str]:
    """Split a text into paragraphs, each with the blank lines after it; the first one also has those before it.

    The concatenation of the paragraphs is the text.
    """
    begins = len(text) - len(text.lstrip())
    ends = [match.end() for match in _BLANK.finditer(text) if match.end() > begins]
    if not ends or ends[-1] != len(text):
        ends.append(len(text))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def hash_paragraphs(text: str, least_bytes: int) -> list[int]:
    """Hash each paragraph, stripped of white space, to a 64-bit number; 0 for paragraphs that are too short.

    Args:
        text: The document.
        least_bytes: Paragraphs of fewer bytes (UTF-8, stripped) are always kept.
    """
    hashes = []
    for paragraph in split_paragraphs(text):
        content = paragraph.strip().encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(content).digest()[:8] if len(content) >= least_bytes else b""
        # A real hash of 0, once in 2^64, means that the paragraph is always kept.
        hashes.append(int.from_bytes(digest, "big"))
    return hashes


def drop_paragraphs(text: str, keep: NDArray[np.bool_]) -> str:
    """Remove the paragraphs of a document that are not kept, and blank lines that would then end it.

    Args:
        text: The document, unchanged since it was fingerprinted.
        keep: bool (paragraphs,), this document's part of `Duplicates.paragraph_keep`.

    Returns:
        The text itself if every paragraph is kept; an empty text if none is.

    Raises:
        ValueError: the number of paragraphs differs.
    """
    paragraphs = split_paragraphs(text)
    if len(paragraphs) != len(keep):
        raise ValueError(f"the document has {len(paragraphs)} paragraphs, not {len(keep)}")
    if bool(keep.all()):
        return text
    kept = [paragraph for paragraph, is_kept in zip(paragraphs, keep.tolist(), strict=True) if is_kept]
    if kept and not keep[-1]:
        # Remove the blank lines after the last kept paragraph: the paragraph after them is gone.
        content = kept[-1].rstrip()
        kept[-1] = content + kept[-1][len(content) :].partition("\n")[0]
    return "".join(kept)

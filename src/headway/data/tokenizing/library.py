"""Hugging Face `tokenizers`, the reference, as it is used here. Without NumPy, which a process that begins lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def open_library(content: bytes, special_tokens_in_text: bool) -> Any:
    """The library's tokenizer. A file may carry the settings of the batch it was last used for, or of a training that
    left out merges at random: a text has one encoding here.

    Args:
        content: A `tokenizer.json`.
        special_tokens_in_text: Make special tokens of those that a text spells out.

    Raises:
        Exception: it cannot be used; the library has no other.
    """
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(content.decode())
    library.no_padding()
    library.no_truncation()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None
    library.encode_special_tokens = not special_tokens_in_text
    return library


def encode(library: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text; no token is added.

    Raises:
        TypeError: a text cannot be written as UTF-8.
    """
    return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def numbers_of(library: Any, tokens: Iterable[str]) -> dict[str, int | None]:
    """The ids that the library has for tokens."""
    return {token: library.token_to_id(token) for token in tokens}

"""Hugging Face `tokenizers`, the reference, as it is used here. Without NumPy, which a process that begins lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.core.errors import DataError


class UnencodableTextError(DataError):
    """A text cannot be encoded, while others can."""


class LibraryPanic(Exception):
    """A library written in Rust gave up in the middle of a call."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn the panic of a library in a block, which is no `Exception` in Python, into one.

    Raises:
        LibraryPanic: there was one.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the type has no module from which to import it
            raise
        raise LibraryPanic(f"the library panicked: {str(error).strip() or 'it does not say why'}") from None


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

    with panics_as_errors():
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
        Exception: a text cannot be encoded; the library has no other, but for `LibraryPanic`.
    """
    with panics_as_errors():
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def numbers_of(library: Any, tokens: Iterable[str]) -> dict[str, int | None]:
    """The ids that the library has for tokens."""
    return {token: library.token_to_id(token) for token in tokens}

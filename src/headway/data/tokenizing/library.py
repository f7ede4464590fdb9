"""The use of Hugging Face `tokenizers`, the reference. It needs no NumPy, which a starting process has not imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.core.errors import DataError


class UnencodableTextError(DataError):
    """A text cannot be encoded, while others can."""


class LibraryPanic(Exception):
    """A library written in Rust panicked during a call."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn the panic of a library in a block, which is not an `Exception` in Python, into one.

    Raises:
        LibraryPanic: The library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the type cannot be imported from any module
            raise
        raise LibraryPanic(f"the library panicked: {str(error).strip() or 'it does not say why'}") from None


def open_library(content: bytes, special_tokens_in_text: bool) -> Any:
    """Load the library's tokenizer, without padding, truncation or dropout.

    A file may have such settings from its last batch or its training; here, a text always has one encoding.

    Args:
        content: A `tokenizer.json`.
        special_tokens_in_text: Encode special tokens that a text spells out as those tokens.

    Raises:
        Exception: The content cannot be used; the library has no other type of error.
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
    """Encode each text to ids; no token is added.

    Raises:
        TypeError: UTF-8 cannot represent a text.
        LibraryPanic: The library panicked.
        Exception: A text cannot be encoded; the library has no other type of error.
    """
    with panics_as_errors():
        return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]


def numbers_of(library: Any, tokens: Iterable[str]) -> dict[str, int | None]:
    """Return the ids that the library gives to tokens."""
    return {token: library.token_to_id(token) for token in tokens}

"""What readers hand on: texts, and what could not be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from headway.core.errors import DataError
from headway.core.format import format_bytes

#: What is unpacked at once may have so many times the bytes of one document: memory holds all of it.
UNPACKED = 16


@dataclass(frozen=True)
class BadDocument:
    """A document, or the rest of a file, that cannot be used."""

    where: str
    """file:line, file:row, or the file."""
    reason: str
    after: int = field(default=0, compare=False)
    """Texts of its batch that stand before it."""
    rest: bool = field(default=False, compare=False)
    """It is the rest of a file."""
    too_large: bool = field(default=False, compare=False)
    """It is sound, for all that is known, but larger than `data.max_document_bytes`."""

    def error(self) -> DataError:
        """Return the error that ends a preparation which does not skip the document."""
        mend = "raise data.max_document_bytes" if self.too_large else "repair it"
        return DataError(self.reason, where=self.where, fix=f"{mend}, or set data.bad_documents: skip")


class TooLargeError(Exception):
    """What is unpacked at once is more than memory is made for.

    Args:
        what: What that is, and how much.
        most: What it may be.
    """

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"{what}, and {UNPACKED} times data.max_document_bytes is {format_bytes(most)}")


def too_large(where: str, what: str, size: int, most: int, *, more: bool = False, rest: bool = False) -> BadDocument:
    """Return what stands for a record that is larger than `data.max_document_bytes`.

    Args:
        where: Its place.
        what: A word for it: line, row, item.
        size: Its bytes.
        most: Those that it may have.
        more: It has more than `size` bytes; nobody has counted how many.
        rest: The rest of the file is left out with it.
    """
    has = f"more than {format_bytes(size)}" if more else _distinct(size, most)
    reason = f"the {what} has {has}, and data.max_document_bytes is {format_bytes(most)}"
    return BadDocument(where, reason, too_large=True, rest=rest)


def _distinct(size: int, most: int) -> str:
    """Bytes for people; all digits where the unit would make them look like the limit."""
    return format_bytes(size) if format_bytes(size) != format_bytes(most) else f"{size:,} bytes"


@dataclass
class Batch:
    """Some documents of a piece, in input order."""

    texts: list[str]
    """Sound documents that hold text."""
    bad: list[BadDocument] = field(default_factory=list)
    """Malformed documents that were met on the way."""
    empty: Counter[int] = field(default_factory=Counter)
    """Documents without any text that were met on the way, by the number of texts before them."""

    def add(self, value: str | BadDocument) -> None:
        """Put one document where it belongs."""
        if isinstance(value, BadDocument):
            self.bad.append(replace(value, after=len(self.texts)))
        elif value:
            self.texts.append(value)
        else:
            self.empty[len(self.texts)] += 1


def text_size(text: str) -> int:
    """UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode())

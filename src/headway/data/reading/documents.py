"""What readers hand on: texts, and what could not be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from headway.core.errors import DataError


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

    def error(self) -> DataError:
        """The error for those who do not want to go on without it."""
        return DataError(self.reason, where=self.where, fix="repair it, or set data.bad_documents: skip")


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

"""Output of readers: texts, and records of documents that could not be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headway.core.errors import DataError
from headway.core.format import format_bytes

#: Limit of the bytes unpacked at once, as a multiple of the size limit of one document: all of it is in memory.
UNPACKED = 16
#: Bytes that a malformed document counts for in a batch, so that a file of such ones does not pile up in memory.
BAD_BYTES = 200
_BATCH = 2**20
# Further bad documents that an error lists.
_LISTED = 4


class ContentError(Exception):
    """The content of a file is not text, or not what its beginning says.

    Args:
        what: What it is.
        fix: What to do.
    """

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.fix = fix


class BadRecordError(Exception):
    """A record yields no text; the message says why."""


class MissingFieldError(BadRecordError):
    """A record yields no text because it lacks the field."""


@dataclass(frozen=True)
class BadDocument:
    """A document, or the rest of a file, that cannot be used."""

    where: str
    """file:line, file:row, or the file."""
    reason: str
    after: int = field(default=0, compare=False)
    """Number of texts before it in its batch."""
    rest: bool = field(default=False, compare=False)
    """Whether it stands for the rest of a file."""
    too_large: bool = field(default=False, compare=False)
    """Whether its only known fault is a size above `data.max_document_bytes`."""
    fix: str | None = field(default=None, compare=False)
    """What to do, where that is known."""

    @property
    def listed(self) -> dict[str, str]:
        """The document as lists of skipped documents have it."""
        return {"where": self.where, "reason": self.reason}

    def error(self, others: Sequence[BadDocument] = ()) -> DataError:
        """Return the error for a preparation that does not skip bad documents.

        Args:
            others: Further bad documents, which the message lists too.
        """
        mend = self.fix or ("raise data.max_document_bytes" if self.too_large else "repair it")
        listed = [f"; also {other.where}: {other.reason}" for other in others[:_LISTED]]
        if len(others) > _LISTED:
            listed.append(f"; and {len(others) - _LISTED:,} more in this part of the file")
        what = "".join((self.reason, *listed))
        return DataError(what, where=self.where, fix=f"{mend}, or set data.bad_documents: skip")


class TooLargeError(Exception):
    """Data that must be unpacked at once exceeds the memory limit.

    Args:
        what: Description of the data, with its size.
        most: The limit in bytes.
    """

    def __init__(self, what: str, most: int) -> None:
        super().__init__(f"{what}, above {UNPACKED} times data.max_document_bytes, {format_bytes(most)}")


def too_large(where: str, what: str, size: int, most: int, *, more: bool = False, rest: bool = False) -> BadDocument:
    """Return the bad document for a record larger than `data.max_document_bytes`.

    Args:
        where: Its place.
        what: A word for the record: line, row, item.
        size: Its bytes.
        most: The limit in bytes.
        more: Whether it has more than `size` bytes, because the count stopped there.
        rest: Whether the rest of the file is skipped with it.
    """
    has = format_bytes(size)
    if more:
        has = f"more than {has}"
    elif has == format_bytes(most):
        has = f"{size:,} bytes"  # rounding would make it look equal to the limit
    reason = f"the {what} has {has}, and data.max_document_bytes is {format_bytes(most)}"
    return BadDocument(where, reason, too_large=True, rest=rest)


@dataclass
class Batch:
    """Some documents of a piece, in input order."""

    texts: list[str]
    """Sound documents that hold text."""
    bad: list[BadDocument] = field(default_factory=list)
    """Malformed documents."""
    empty: Counter[int] = field(default_factory=Counter)
    """Documents without text, counted by the number of texts before them."""

    def add(self, value: str | BadDocument) -> None:
        """Add one document to the matching field."""
        if isinstance(value, BadDocument):
            self.bad.append(replace(value, after=len(self.texts)))
        elif value:
            self.texts.append(value)
        else:
            self.empty[len(self.texts)] += 1


def batched(documents: Iterable[str | BadDocument]) -> Iterator[Batch]:
    """Yield documents in batches of about a mebibyte of text; the last one may be empty."""
    batch = Batch([])
    size = 0
    for document in documents:
        batch.add(document)
        size += len(document) if isinstance(document, str) else BAD_BYTES
        if size >= _BATCH:
            yield batch
            batch = Batch([])
            size = 0
    yield batch


def unicode_text(text: str) -> str:
    """Return a text if it can be encoded as UTF-8.

    Raises:
        BadRecordError: it contains a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Undecodable bytes of a CSV file, or a lone surrogate in a JSON escape.
        raise BadRecordError(f"not valid UTF-8: {error.reason} at character {error.start:,}") from None
    return text


def text_size(text: str) -> int:
    """Return the UTF-8 bytes of a text."""
    return len(text) if text.isascii() else len(text.encode())

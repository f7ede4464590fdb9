"""Base class and helpers of cleaning steps."""

from __future__ import annotations

from typing import Any

from headway.core.errors import DataError
from headway.text.clean.counts import SHOWN, Drop, StepCounts

_CONTEXT = 60


class Step:
    """A cleaning step. `apply` runs its filters and its changes, `change` only its changes.

    Both are pure functions of the text. Whenever `apply` keeps a text, `change` returns the same result.
    """

    #: Version of the rules. Increase it with each change, so that results of the old rules become outdated.
    version = 1

    def __init__(self) -> None:
        self.counts = StepCounts("")
        """Counts of what `apply` finds inside documents; `Cleaner.take_counts` replaces the object."""

    def apply(self, text: str) -> str | Drop:
        """Return the text for the next step, or the reason to drop the document."""
        return self.change(text)

    def change(self, text: str) -> str:
        """Return the text after this step's changes, without counts."""
        return text

    def describe(self) -> dict[str, Any]:
        """Return what the outcome depends on besides the config and `version`, as plain JSON."""
        return {}

    def remarks(self) -> list[str]:
        """Return notes for the user of this step; they are shown once, not per worker."""
        return []

    def example(self, before: str, after: str) -> str:
        """Return up to `SHOWN` characters that show a change; by default, the old text around the first difference."""
        return around(before, first_difference(before, after))


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not blank, without white space around them."""
    return [line for line in map(str.strip, with_line_feeds(text).split("\n")) if line]


def with_line_feeds(text: str) -> str:
    """Return a text whose lines end in LF, not in CR LF or in CR alone.

    Rules about lines see the same lines whatever ends them. That is no new version of any step: texts without a CR
    alone give what they gave.
    """
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def utf8_size(text: str) -> int:
    """Return the bytes of a text in UTF-8.

    Raises:
        DataError: it contains a lone surrogate, which UTF-8 cannot encode.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"a document is not valid text: {error.reason} at character {error.start:,}", where=named(text)
        ) from None


def named(text: str) -> str:
    """Describe a document that has no name by its beginning."""
    start = text.strip()[:60].encode(errors="replace").decode()
    return f"document of {len(text):,} characters that begins with {start!r}"


def first_difference(before: str, after: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    low = 0
    high = min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def around(text: str, position: int) -> str:
    """Return `SHOWN` characters of a text from shortly before a position."""
    start = max(0, position - _CONTEXT)
    return text[start : start + SHOWN]


def beyond(reason: str, value: float, sign: str, limit: float) -> Drop:
    """Return the drop of a document one of whose values is beyond a limit."""
    return Drop(reason, f"{reason} {shown_number(value)} {sign} {shown_number(limit)}")


def shown_number(value: float) -> str:
    """Format a number for messages with three digits."""
    return f"{value:.3g}"

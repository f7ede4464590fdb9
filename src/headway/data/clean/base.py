"""What every cleaning step is made of."""

from __future__ import annotations

from typing import Any

from headway.core.errors import DataError
from headway.data.clean.counts import SHOWN, Drop, StepCounts

_CONTEXT = 60


class Step:
    """One step: `apply` asks its filters and makes its changes, `change` makes the changes alone.

    Both are pure functions of the text, and whenever `apply` keeps a text, `change` gives the same one.
    """

    #: Raised when a step's rules change, so that what was cleaned by the old ones is not taken for up to date.
    version = 1

    def __init__(self) -> None:
        self.counts = StepCounts("")
        """Where `apply` counts what it finds inside documents; its owner puts another in place when it has read it."""

    def apply(self, text: str) -> str | Drop:
        """The text that goes on, or why none does."""
        return self.change(text)

    def change(self, text: str) -> str:
        """The text as this step changes it, nothing counted."""
        return text

    def describe(self) -> dict[str, Any]:
        """What the outcome depends on besides the config and `version`: plain JSON."""
        return {}

    def remarks(self) -> list[str]:
        """What somebody who uses this step should know, to be said once, whatever the number of workers."""
        return []

    def example(self, before: str, after: str) -> str:
        """Up to `SHOWN` characters that show a change: by default the old text around the first difference."""
        return around(before, first_difference(before, after))


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8.

    Raises:
        DataError: it holds half of a surrogate pair, which UTF-8 cannot express.
    """
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"a document is no valid text: {error.reason} at character {error.start:,}", where=named(text)
        ) from None


def named(text: str) -> str:
    """What to call a document that has no name: its beginning."""
    start = text.strip()[:60].encode(errors="replace").decode()
    return f"document of {len(text):,} characters that begins with {start!r}"


def first_difference(before: str, after: str) -> int:
    """Length of the longest common beginning of two texts."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        if before[low:middle] == after[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def around(text: str, position: int) -> str:
    """`SHOWN` characters of a text from a little before a position on."""
    start = max(0, position - _CONTEXT)
    return text[start : start + SHOWN]


def shown_number(value: float) -> str:
    """Three digits are enough for people."""
    return f"{value:.3g}"

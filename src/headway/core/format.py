"""Numbers and texts formatted for people. An unknown number is "n/a"."""

from __future__ import annotations

import re

UNKNOWN = "n/a"

_NOT_PLAIN = re.compile(r"[^ -~]")

#: Spaces of other widths, such as the ideographic space: `str.isprintable` is false for them.
_BLANKS = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"


def format_count(value: float | None) -> str:
    """Format a number with a suffix: 1234 -> "1,234"; 41_200 -> "41.2k"; 2_000_000_000 -> "2.0B"."""
    if value is None:
        return UNKNOWN
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        # A value that would be rounded to "1000.0k" is "1.0M".
        if abs(value) >= (limit if suffix == "k" else limit * 0.99995):
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.1f}{suffix}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"


def format_usd(amount: float) -> str:
    """Format an amount of money; cents and less are shown with the digits that they have."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.2g}"


def counted(number: int, word: str) -> str:
    """Format a number of things: 1 -> "1 row"; 1234 -> "1,234 rows"; 2 -> "2 micro-batches"."""
    return f"{number:,} {plural(number, word)}"


def plural(number: int, word: str) -> str:
    """Return a word in the singular or plural form that fits a number."""
    return word + ("" if number == 1 else "es" if word.endswith(("ch", "s")) else "s")


def printable(text: str, keep: str = "") -> str:
    """Escape untrusted text for a terminal, as in `\\x1b`.

    Characters that would move the cursor, change colours, break a line or reverse the writing direction are escaped.

    Args:
        text: Names, messages, documents.
        keep: Characters that stay unchanged, for example line ends.
    """
    if text.isprintable():
        return text
    keep += _BLANKS

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        return (
            character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        )

    return _NOT_PLAIN.sub(shown, text)


def format_bytes(value: float | None) -> str:
    """Format bytes with a binary unit: 1536 -> "1.5 KiB"."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < (1024 if unit == "B" else 1023.95):
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_seconds(value: float | None) -> str:
    """Format a duration in its two largest units: 75 -> "1 m 15 s"; 8040 -> "2 h 14 m"."""
    if value is None:
        return UNKNOWN
    if value < 10:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} m {seconds % 60} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60} m"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"

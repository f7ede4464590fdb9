"""The Unicode step and the length filter."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from headway.config.sections.clean import LengthStep, UnicodeStep
from headway.core.errors import needing
from headway.text.clean.base import Step
from headway.text.clean.counts import Drop

# Category Cc (C0, delete, C1) without tab, line feed and carriage return.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]+")


class Unicode(Step):
    """Repair of mojibake, removal of control characters, normalization.

    Mojibake comes first, since control characters are among its traces.

    Raises:
        ConfigError: mojibake repair is on, but `ftfy` is not installed.
    """

    def __init__(self, config: UnicodeStep) -> None:
        super().__init__()
        self._form = config.form
        self._remove_control = config.control_characters == "remove"
        self._repair = _mojibake_repair() if config.mojibake else None

    def change(self, text: str) -> str:
        """Apply all three changes. ASCII text is in every normal form and has no mojibake."""
        plain = text.isascii()
        if self._repair and not plain:
            text = self._repair(text)
        if self._remove_control and _CONTROL.search(text):
            text = _CONTROL.sub("", text)
        if self._form != "none" and not plain and not unicodedata.is_normalized(self._form, text):
            text = unicodedata.normalize(self._form, text)
        return text

    def apply(self, text: str) -> str:
        """Apply the changes, and count the findings."""
        result = self.change(text)
        if result != text:
            if self._repair and not text.isascii() and self._repair(text) != text:
                self.counts.reasons["mojibake"] += 1
            if self._remove_control and _CONTROL.search(text):
                self.counts.reasons["control characters"] += sum(map(len, _CONTROL.findall(text)))
            if self._form != "none" and not unicodedata.is_normalized(self._form, text):
                self.counts.reasons[f"not {self._form}"] += 1
        return result

    def describe(self) -> dict[str, Any]:
        """Return the version of `ftfy`, whose rules change between versions."""
        return {"ftfy": version("ftfy")} if self._repair else {}


def _mojibake_repair() -> Callable[[str], str]:
    with needing("ftfy", "clean", "repairing mojibake (the step `unicode`)"):
        import ftfy

    # Fix only encodings: the library's other repairs would, for example, straighten quotes. Work line by line, as its
    # `fix_text` does: lines may have different errors, and ASCII lines, nearly all in English text, need no repair.
    def repair(text: str) -> str:
        return "\n".join([line if line.isascii() else ftfy.fix_encoding(line) for line in text.split("\n")])

    return repair


class Length(Step):
    """Limits on characters and on words."""

    def __init__(self, config: LengthStep) -> None:
        super().__init__()
        self._characters = config.min_characters or 0, config.max_characters
        self._words = config.min_words or 0, config.max_words
        self._count_words = config.min_words is not None or config.max_words is not None

    def apply(self, text: str) -> str | Drop:
        """Check characters first, since they cost nothing to count."""
        drop = _outside(len(text), *self._characters, "characters")
        if drop is None and self._count_words:
            drop = _outside(len(text.split()), *self._words, "words")
        return drop or text


def _outside(count: int, low: int, high: int | None, what: str) -> Drop | None:
    if count < low:
        return Drop(f"few {what}", f"{count:,} {what} < {low:,}")
    if high is not None and count > high:
        return Drop(f"many {what}", f"{count:,} {what} > {high:,}")
    return None

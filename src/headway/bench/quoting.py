"""What others have written, so that it stands in a file as text: in Markdown, and in a table for a spreadsheet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headway.bench.wording import one_line

_MARKDOWN = re.compile(r"([\\`*_\[\]<>!|&~$])")
#: At the start of a line: a heading, an item of a list, a line below a heading.
_MARKDOWN_START = re.compile(r"^(\s*)([#+=-]|\d+(?=[.)]\s))")
#: What spreadsheets take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def in_markdown(text: str) -> str:
    """One line that shows the text as it is."""
    escaped = _MARKDOWN.sub(r"\\\1", one_line(text))
    return _MARKDOWN_START.sub(_start, escaped)


def _start(match: re.Match[str]) -> str:
    # A digit cannot be escaped, the dot behind it can; what is before it is as good without a meaning.
    return f"{match[1]}&#8203;{match[2]}" if match[2][0].isdigit() else f"{match[1]}\\{match[2]}"


def in_csv(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line whose texts are no formulas; numbers stay what they are."""
    return {key: _no_formula(value) if isinstance(value, str) else value for key, value in line.items()}


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text

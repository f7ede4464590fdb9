"""Quoting of foreign text, so that it stays text in Markdown and in a spreadsheet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headway.lab.bench.wording import one_line

_MARKDOWN = re.compile(r"([\\`*_\[\]<>!|&~$])")
#: Characters with a meaning at the start of a line: a heading, a list item, an underline of a heading.
_MARKDOWN_START = re.compile(r"^(\s*)([#+=-]|\d+(?=[.)]\s))")
#: Characters that spreadsheets take for the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def in_markdown(text: str) -> str:
    """Return one line that shows the text unchanged."""
    escaped = _MARKDOWN.sub(r"\\\1", one_line(text))
    return _MARKDOWN_START.sub(_start, escaped)


def _start(match: re.Match[str]) -> str:
    # A digit cannot be escaped, the dot behind it can; what is before it is as good without a meaning.
    return f"{match[1]}&#8203;{match[2]}" if match[2][0].isdigit() else f"{match[1]}\\{match[2]}"


def markdown_texts(texts: Sequence[str]) -> list[str]:
    """Return the lines of paragraphs; a text that begins with a dash becomes an item of a list."""
    return [f"- {in_markdown(text[2:])}" if text.startswith("- ") else f"\n{in_markdown(text)}\n" for text in texts]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose cells show their texts unchanged."""
    lines = [[in_markdown(text) for text in headers], ["---"] * len(headers)]
    lines += [[in_markdown(text) for text in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def in_csv(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line whose texts are not formulas; numbers do not change."""
    return {key: _no_formula(value) if isinstance(value, str) else value for key, value in line.items()}


def _no_formula(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text

"""Markdown: foreign text that stays text, paragraphs, and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from headway.core.format import printable

_MARKDOWN = re.compile(r"([\\`*_\[\]<>!|&~$])")
#: Characters with a meaning at the start of a line: a heading, a list item, an underline of a heading.
_MARKDOWN_START = re.compile(r"^(\s*)([#+=-]|\d+(?=[.)]\s))")


def in_markdown(text: str) -> str:
    """Return one line that shows the text unchanged."""
    escaped = _MARKDOWN.sub(r"\\\1", printable(" ".join(text.split())))
    return _MARKDOWN_START.sub(_start, escaped)


def _start(match: re.Match[str]) -> str:
    # A digit cannot be escaped, the dot behind it can; what is before it is as good without a meaning.
    return f"{match[1]}&#8203;{match[2]}" if match[2][0].isdigit() else f"{match[1]}\\{match[2]}"


def markdown_texts(texts: Sequence[str]) -> list[str]:
    """Return the lines of paragraphs; a text that begins with a dash becomes an item of a list."""
    lines: list[str] = []
    for before, text in pairwise(["- ", *texts]):
        is_item = text.startswith("- ")
        if lines and not (is_item and before.startswith("- ")):
            lines.append("")
        lines.append(f"- {in_markdown(text[2:])}" if is_item else in_markdown(text))
    return lines


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose cells show their texts unchanged."""
    lines = [[in_markdown(text) for text in headers], ["---"] * len(headers)]
    lines += [[in_markdown(text) for text in row] for row in rows]
    return [f"| {' | '.join(line)} |" for line in lines]

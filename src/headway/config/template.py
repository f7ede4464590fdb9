"""Templates that render several fields of a record into one document: `Question: {question}\\nAnswer: {answer}`."""

from __future__ import annotations

import string
from typing import NamedTuple

#: Template of a source with `format: chat`, for its readers. It names no field, so no template of a user equals it.
CHAT = "chat:"
#: The same with `format: completion`.
COMPLETION = "completion:"
#: Templates of records whose fields are found by their names, and which say what of them is trained.
LAYOUTS = frozenset((CHAT, COMPLETION))


class Part(NamedTuple):
    """Literal text, and the field that follows it."""

    literal: str
    field: str | None
    """A field's name, with dots between the levels of a nested one; None at the end of the template."""


def parse_template(template: str) -> tuple[Part, ...]:
    """Parse a template into its parts, in order. `{{` and `}}` stand for braces.

    Raises:
        ValueError: its braces do not match, it names no field, or has a conversion or format.
    """
    parts = []
    try:
        for literal, name, form, conversion in string.Formatter().parse(template):
            if name is not None and (form or conversion):
                raise ValueError(f"'{{{name}}}' cannot have a format or conversion; name the field alone")
            if name is not None and not name.strip():
                raise ValueError("'{}' names no field; write for example {question}, or {{}} for literal braces")
            if name is not None and ("[" in name or "]" in name):
                raise ValueError(f"'{{{name}}}': nested fields are written with dots, as {{meta.title}}")
            parts.append(Part(literal, name))
    except ValueError as error:
        text = str(error)
        # The standard library's message for unbalanced braces.
        text = f"{text}; literal braces are written {{{{ and }}}}" if not text.startswith("'") else text
        raise ValueError(f"not a template: {text}") from None
    if not any(part.field for part in parts):
        raise ValueError("the template names no field; write for example 'Question: {question}'")
    return tuple(parts)


def template_fields(template: str) -> list[str]:
    """Return the distinct fields that a template names, in order.

    Raises:
        ValueError: see `parse_template`.
    """
    return list(dict.fromkeys(part.field for part in parse_template(template) if part.field))

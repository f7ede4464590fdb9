"""The text of a document from a record with fields: one field, or a template over several fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from headway.config.template import CHAT, COMPLETION, parse_template, template_fields
from headway.core.errors import DataError
from headway.text.reading.conversations import (
    COMPLETION_FIELDS,
    chat_fields,
    completion_text,
    conversation_text,
    layout_format,
)
from headway.text.reading.documents import BadRecordError, MissingFieldError, unicode_text

_MISSING = object()
# Types with one form in JSON (bool is a subclass of int). Lists, objects and dates have several forms, and a silent
# choice of one would be a guess.
_PLAIN = (int, float)


def text_getter(field: str, template: str | None, by_orjson: bool = False) -> Callable[[Any], str]:
    """Return a function from a record to its text. It raises `BadRecordError` if the record yields none.

    Args:
        field: Field that holds the text.
        template: Template over several fields, instead of `field`; `CHAT` for conversations.
        by_orjson: Whether the records come from `orjson`. Its strings need no check, but it rounds integers of more
            than 64 bits: a template that would show such a number raises `BadRecordError`.
    """
    if template == CHAT:
        return partial(conversation_text, by_orjson=by_orjson)
    if template == COMPLETION:
        return completion_text
    return _rendering(template, by_orjson) if template is not None else _one_field(field)


@lru_cache(maxsize=256)
def _one_field(field: str) -> Callable[[Any], str]:
    def text(record: Any) -> str:
        value = _value(record, field)
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise BadRecordError(f"field '{field}' holds {kind}, not text")
        return unicode_text(value)

    return text


@lru_cache(maxsize=256)
def _rendering(template: str, by_orjson: bool) -> Callable[[Any], str]:
    parts = parse_template(template)

    def text(record: Any) -> str:
        pieces = []
        for literal, field in parts:
            pieces.append(literal)
            if field is not None:
                value = _value(record, field)
                if type(value) is not str:
                    if by_orjson and type(value) is float and abs(value) >= 2**63:
                        raise BadRecordError(f"field '{field}' of the template may have been rounded")
                    value = _rendered(value, field)
                pieces.append(value)
        rendered = "".join(pieces)
        return rendered if by_orjson else unicode_text(rendered)

    return text


def _value(record: Any, field: str, above: str = "") -> Any:
    """Return a field's value; `a.b` means field `b` of field `a`, unless a field is named `a.b`.

    Args:
        record: The record.
        field: Name of the field.
        above: Names of the levels above the record, each with a dot; for messages.
    """
    # Test the exact type first: that is many times faster than the test for the abstract class.
    if type(record) is not dict and not isinstance(record, Mapping):
        raise BadRecordError(f"holds {type(record).__name__}, neither text nor fields with names")
    value = record.get(field, _MISSING)
    if value is not _MISSING:
        return value
    head, dot, tail = field.partition(".")
    inner = record.get(head, _MISSING) if dot else _MISSING
    wanted = f"{above}{field}"
    if inner is _MISSING:
        raise MissingFieldError(f"no field '{wanted}'{fields_there(wanted, [f'{above}{key}' for key in record])}")
    if not isinstance(inner, Mapping):
        kind = "null" if inner is None else type(inner).__name__
        raise MissingFieldError(f"no field '{wanted}': '{above}{head}' holds {kind}, not an object with fields")
    return _value(inner, tail, f"{above}{head}.")


def _rendered(value: Any, field: str) -> str:
    """Format a value for a template: text unchanged, numbers as in JSON."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, _PLAIN):
        return json.dumps(value)
    if value is None:
        raise BadRecordError(f"field '{field}' of the template is null")
    what = "a list" if isinstance(value, list | tuple) else f"{type(value).__name__}"
    raise BadRecordError(
        f"field '{field}' of the template holds {what}, which has no unique text form: name a text field inside it"
    )


def wanted_fields(field: str, template: str | None, present: Sequence[str] | None = None) -> list[str]:
    """Return the fields that form a document's text; those of a conversation may be absent where `present` is known."""
    if template == CHAT:
        return chat_fields(present)
    if template == COMPLETION:
        return [*COMPLETION_FIELDS]
    return [field] if template is None else template_fields(template)


def check_fields(present: Sequence[str], field: str, template: str | None, where: str) -> None:
    """Check that a table has every needed column exactly once.

    Raises:
        DataError: a column is missing or ambiguous.
    """
    for wanted in wanted_fields(field, template):
        check_unique_name(wanted, present, where)
        if wanted not in present:
            raise missing_field(wanted, present, where)


def check_unique_name(wanted: str, present: Sequence[str], where: str) -> None:
    """Raise a `DataError` if several columns have the wanted name."""
    count = present.count(wanted)
    if count > 1:
        what = f"{count} columns have the name '{wanted}'"
        raise DataError(what, where=where, fix="give them names of their own")


def missing_field(wanted: str, present: Sequence[str], where: str) -> DataError:
    """Return the error for a record or table that lacks a needed field."""
    return DataError(f"no field '{wanted}'{fields_there(wanted, present)}", where=where, fix=field_fix(present))


def field_fix(present: Sequence[str]) -> str:
    """Return what to do about records without the needed field."""
    layout = layout_format(present)
    return f"set the source's format: {layout}" if layout else "set the source's field"


def fields_there(wanted: str, present: Sequence[str]) -> str:
    """Return the end of a message about a missing field: the nearest name and the existing fields."""
    import difflib

    near = difflib.get_close_matches(wanted, present, 1)
    guess = f"; did you mean '{near[0]}'?" if near else ""
    names = ", ".join(sorted(present)[:20]) or "none"
    layout = layout_format(present)
    hint = f"; format: {layout} reads records with these fields" if layout else ""
    return f"; there are: {names}{guess}{hint}"

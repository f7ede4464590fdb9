"""From a record with fields to a document's text: one field, or a template over several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from headway.config.template import parse_template, template_fields
from headway.core.errors import DataError

_MISSING = object()
# What has one form in JSON (truth values are among the whole numbers); lists, objects and dates have several forms, and
# guessing one would be silent.
_PLAIN = (int, float)


class BadRecordError(Exception):
    """A record gives no text; the message says why."""


class MissingFieldError(BadRecordError):
    """It gives none because it has no such field."""


def text_getter(field: str, template: str | None, by_orjson: bool = False) -> Callable[[Any], str]:
    """A function from a record to its text, which raises `BadRecordError` when the record gives none.

    Args:
        field: The field that holds the text.
        template: Makes the text of several fields instead.
        by_orjson: The records come from `orjson`. Its strings need no check, but it rounds whole numbers of more than
            64 bits: a template that would show a number that large raises `BadRecordError`.
    """
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
    """A field's value; `a.b` is field `b` of field `a` unless there is a field of that very name.

    `above` are the names of the levels above the record, each with its dot.
    """
    # A check for the type itself is many times faster than one for the abstract class.
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
    """A value in a template: text as it is, numbers as JSON writes them."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, _PLAIN):
        return json.dumps(value)
    if value is None:
        raise BadRecordError(f"field '{field}' of the template is null")
    what = "a list" if isinstance(value, list | tuple) else f"{type(value).__name__}"
    raise BadRecordError(
        f"field '{field}' of the template holds {what}, which has no one text form: name a field of text inside it"
    )


def unicode_text(text: str) -> str:
    """The text, when it can be written as UTF-8.

    Raises:
        BadRecordError: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # Undecodable bytes of a CSV file, or half of a surrogate pair in a JSON escape.
        raise BadRecordError(f"not valid UTF-8: {error.reason} at character {error.start:,}") from None
    return text


def wanted_fields(field: str, template: str | None) -> list[str]:
    """The fields that a document's text is made of."""
    return [field] if template is None else template_fields(template)


def check_fields(present: Sequence[str], field: str, template: str | None, where: str) -> None:
    """Refuse a table whose columns lack a field that every document needs.

    Raises:
        DataError: one is missing, or nobody knows which column it is.
    """
    for wanted in wanted_fields(field, template):
        check_unique_name(wanted, present, where)
        if wanted not in present:
            raise missing_field(wanted, present, where)


def check_unique_name(wanted: str, present: Sequence[str], where: str) -> None:
    """Raise a DataError when several columns have the wanted name."""
    count = present.count(wanted)
    if count > 1:
        what = f"{count} columns have the name '{wanted}'"
        raise DataError(what, where=where, fix="give them names of their own")


def missing_field(wanted: str, present: Sequence[str], where: str) -> DataError:
    """The error for a record or table without the field that should hold the text."""
    return DataError(f"no field '{wanted}'{fields_there(wanted, present)}", where=where, fix="set the source's field")


def fields_there(wanted: str, present: Sequence[str]) -> str:
    """The fields that are there instead of the wanted one, the nearest name first named."""
    import difflib

    near = difflib.get_close_matches(wanted, present, 1)
    guess = f"; did you mean '{near[0]}'?" if near else ""
    names = ", ".join(sorted(present)[:20]) or "none"
    return f"; there are: {names}{guess}"

"""The field of a file's text, where the config names none and the file has no field `text`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headway.text.reading.conversations import layout_format

#: The default of `field`, for which another one is taken only where it is missing.
DEFAULT = "text"
# Usual names of the text, none of them more usual than the others.
_USUAL = ("content", "body", "message")
# Text that says something about a document, and is none.
_ABOUT = """
id _id uuid guid doc_id docid url uri link href path file filename file_name date time datetime timestamp created
created_at updated updated_at published source origin domain host lang language language_code locale name title author
user username label category class tag tags topic split subset type kind format license hash sha sha1 sha256 md5 digest
version
"""
# A name of a CSV column; a file without names has a first row of text and numbers in their place.
_NAME = re.compile(r"[^\W\d][\w.-]{0,63}")


def guessed_field(fields: Mapping[str, bool]) -> str | None:
    """Return the field of the text; None if that is not plain, or is `text`.

    Args:
        fields: The names of a file's fields, and whether each holds text.
    """
    if DEFAULT in fields or layout_format([*fields]) is not None:
        return None
    with_text = [name for name, is_text in fields.items() if is_text]
    found = [name for name in _USUAL if name in with_text]
    found = found or [name for name in with_text if name.lower() not in _ABOUT.split()]
    return found[0] if len(found) == 1 else None


def fields_of_records(records: Iterable[Any]) -> dict[str, bool]:
    """Return the fields of some records, and whether each holds text; a field `text` ends the search."""
    fields: dict[str, bool] = {}
    for record in records:
        for name, value in record.items() if isinstance(record, dict) else ():
            if value is not None:
                fields[name] = fields.get(name, True) and isinstance(value, str)
            elif name == DEFAULT:
                fields[name] = True
        if DEFAULT in fields:
            break
    return fields


def fields_of_rows(names: list[str], rows: Iterable[list[str]]) -> dict[str, bool]:
    """Return the columns of a CSV file, and whether each holds text: any value that is no number."""
    is_text = [False] * len(names)
    for row in rows:
        for place, value in enumerate(row[: len(names)]):
            is_text[place] = is_text[place] or not _is_number(value)
    return {name: text and bool(_NAME.fullmatch(name)) for name, text in zip(names, is_text, strict=True)}


def _is_number(value: str) -> bool:
    try:
        float(value or 0)
    except ValueError:
        return False
    return True

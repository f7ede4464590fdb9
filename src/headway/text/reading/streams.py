"""Sources without files: the items of a Python iterable, divided into pieces that carry their texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from headway.config.sections.data import MAX_DOCUMENT_BYTES
from headway.config.template import LAYOUTS
from headway.config.units import Amount
from headway.core.errors import ConfigError, DataError, HeadwayError
from headway.core.functions import load_function
from headway.text.reading.documents import (
    BAD_BYTES,
    BadDocument,
    BadRecordError,
    Batch,
    MissingFieldError,
    text_size,
    too_large,
    unicode_text,
)
from headway.text.reading.records import text_getter

Stream = Callable[[], Iterable[Any]]

PREFIX = "python:"


def function_stream(path: str) -> Stream:
    """Load the function that `python:package.module:function` names.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    name = path.removeprefix(PREFIX)
    if not all(name.partition(":")):
        raise ConfigError(
            "a Python source is written python:package.module:function", where=path, fix="name module and function"
        )
    _, function = load_function(name, f"data.sources: {path}")
    return cast(Stream, function)


def given_stream(name: str, given: Mapping[str, Any]) -> Stream:
    """Return the stream of the iterable, or of the function that makes one, that was passed for the source `name`.

    Raises:
        ConfigError: none was passed, or it can be iterated only once.
    """
    if name not in given:
        raise ConfigError(
            f"source '{name}' must be passed as an iterable, but was not",
            where="data.sources",
            fix=f"prepare(config.data, iterables={{'{name}': texts}}), or python:MODULE:FUNCTION as its path",
        )
    value = given[name]
    if callable(value):
        return cast(Stream, value)
    if iter(value) is value:
        raise ConfigError(
            f"source '{name}' can be iterated only once, but a preparation may read it several times",
            where="iterables",
            fix="pass a list, or a function that makes the iterator",
        )
    return lambda: cast(Iterable[Any], value)


def read_stream(
    name: str,
    stream: Stream,
    field: str,
    template: str | None,
    *,
    size: int,
    limit: Amount | None = None,
    most: int = MAX_DOCUMENT_BYTES,
) -> Iterator[tuple[Batch, int]]:
    """Yield the items of a stream in batches of about `size` bytes of text, each with its bytes.

    Items are texts, or mappings from which `field` or `template` makes a text. Other items, and texts of more than
    `most` bytes, are malformed documents. No further item is requested when the texts so far reach the limit.

    Raises:
        DataError: the function does not return an iterable, or fails during iteration.
    """
    text_of = text_getter(field, template)
    batch = Batch([])
    found = 0
    fields_seen = False
    left = math.inf if limit is None else limit.amount
    for number, item in enumerate(_items(name, stream), 1):
        try:
            text = unicode_text(item) if isinstance(item, str) and template not in LAYOUTS else text_of(item)
        except BadRecordError as error:
            fields_seen = fields_seen or not isinstance(error, MissingFieldError)
            batch.add(BadDocument(f"{name}:item {number}", str(error)))
            found += BAD_BYTES
        else:
            fields_seen = True
            utf8_bytes = text_size(text)
            if utf8_bytes > most:
                batch.add(too_large(f"{name}:item {number}", "item", utf8_bytes, most))
                found += BAD_BYTES
            else:
                batch.add(text)
                found += utf8_bytes
                left -= bool(text) if limit is not None and limit.unit == "documents" else utf8_bytes
        if left <= 0:
            break
        if found >= size:
            yield _checked(batch, fields_seen), found
            batch = Batch([])
            found = 0
    if batch.texts or batch.bad or batch.empty:
        yield _checked(batch, fields_seen), found


def _checked(batch: Batch, fields_seen: bool) -> Batch:
    """Return the batch.

    Raises:
        DataError: no item so far had the field, so the config is wrong, not the items.
    """
    if not fields_seen:
        first = batch.bad[0]
        raise DataError(first.reason, where=first.where, fix="set the source's field or template")
    return batch


def _items(name: str, stream: Stream) -> Iterator[Any]:
    number = 0
    try:
        items = stream()
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
            raise DataError(
                f"the source must be an iterable of texts or mappings, not {type(items).__name__}",
                where=name,
                fix="let the function return a list, or yield its items",
            )
        for number, item in enumerate(items, 1):  # noqa: B007
            yield item
    except (HeadwayError, GeneratorExit):
        raise
    except Exception as error:
        raise DataError(
            f"the source failed after {number:,} items: {type(error).__name__}: {error}",
            where=name,
            fix="repair the function; nothing was written",
        ) from error

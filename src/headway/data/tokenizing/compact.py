"""A `tokenizer.json` as libraries read it soonest. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Any

import orjson


def short_form(content: bytes) -> Any:
    """The JSON of the same tokenizer with merges as older files have them, which are read in half the time.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is no tokenizer.json.
    """
    spec = orjson.loads(content)
    model = spec["model"]
    merges = model.get("merges")
    if merges and all(isinstance(pair, list) for pair in merges):
        joined = [" ".join(pair) for pair in merges]
        if all(merge.count(" ") == 1 for merge in joined):
            model["merges"] = joined
    return spec


def compact(content: bytes) -> bytes:
    """`short_form` in few bytes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is no tokenizer.json.
    """
    return orjson.dumps(short_form(content))

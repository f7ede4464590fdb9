"""A `tokenizer.json` as libraries read it soonest. Nothing heavy is imported here."""

from __future__ import annotations


def compact(content: bytes) -> bytes:
    """The same tokenizer in few bytes, with merges as older files have them, which are read in half the time.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is no tokenizer.json.
    """
    import orjson

    spec = orjson.loads(content)
    model = spec["model"]
    merges = model.get("merges")
    if merges and all(isinstance(pair, list) for pair in merges):
        joined = [" ".join(pair) for pair in merges]
        if all(merge.count(" ") == 1 for merge in joined):
            model["merges"] = joined
    return orjson.dumps(spec)

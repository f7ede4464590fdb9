"""The tokens that the template of a tokenizer.json (its `post_processor`) puts before a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_PAIR = ("BertProcessing", "RobertaProcessing")
_TEMPLATE = "TemplateProcessing"


def tokens_before(spec: dict[str, Any]) -> list[int]:
    """Return the ids that a template puts before a text, in order."""
    return [number for step in reversed(_steps(spec.get("post_processor"))) for number in _before(step)]


def with_tokens_before(content: bytes, tokens: Mapping[str, int]) -> bytes:
    """Return a tokenizer.json whose template puts exactly these tokens before a text.

    The tokens that it puts after a text stay. If the template already does so, the content is returned unchanged.

    Args:
        content: The content of the file.
        tokens: The tokens with their ids, in order.
    """
    import orjson

    spec = orjson.loads(content)
    if tokens_before(spec) == list(tokens.values()):
        return content
    steps = [step for step in map(_without, _steps(spec.get("post_processor"))) if step is not None]
    if tokens:
        template = next((step for step in steps if step["type"] == _TEMPLATE), None)
        if template is None:
            template = {"type": _TEMPLATE, "single": [_sequence("A")], "pair": [_sequence("A"), _sequence("B", 1)]}
            steps.append(template)  # the library allows only one
        template["single"] = [*(_special(token) for token in tokens), *template["single"]]
        template["pair"] = [part for piece in template["pair"] for part in _with_tokens(piece, tokens)]
        template["special_tokens"] = {**template.get("special_tokens", {}), **_entries(tokens)}
    together = {"type": "Sequence", "processors": steps} if len(steps) > 1 else None
    spec["post_processor"] = together or next(iter(steps), None)
    return orjson.dumps(spec)


def is_same_but_for_template(one: bytes, other: bytes) -> bool:
    """Return whether two tokenizer.json encode every text equally, and differ at most in the tokens around it."""
    import orjson

    specs = [orjson.loads(content) for content in (one, other)]
    return {**specs[0], "post_processor": None} == {**specs[1], "post_processor": None}


def _steps(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """List the post-processors in order."""
    if processor is None:
        return []
    if processor.get("type") == "Sequence":
        return [step for part in processor["processors"] for step in _steps(part)]
    return [processor]


def _before(step: dict[str, Any]) -> list[int]:
    """Return the ids that a post-processor puts before a text."""
    if step.get("type") in _BY_PAIR:
        return [int(step["cls"][1])]
    if step.get("type") != _TEMPLATE:
        return []
    names = _leading(step["single"])
    return [int(number) for name in names for number in step["special_tokens"][name]["ids"]]


def _leading(pieces: list[dict[str, Any]]) -> list[str]:
    """Return the special tokens with which a template begins."""
    names: list[str] = []
    for piece in pieces:
        if "SpecialToken" not in piece:
            break
        names.append(piece["SpecialToken"]["id"])
    return names


def _without(step: dict[str, Any]) -> dict[str, Any] | None:
    """Return a step that puts nothing before a text, but is otherwise equal; None if it would do nothing."""
    if step.get("type") in _BY_PAIR:
        token, number = step["sep"]
        between = [_special(token)] * (1 + (step["type"] == "RobertaProcessing"))
        behind = _special(token, 1)
        pair = [_sequence("A"), *between, _sequence("B", 1), behind]
        single = [_sequence("A"), _special(token)]
        return {"type": _TEMPLATE, "single": single, "pair": pair, "special_tokens": _entries({token: int(number)})}
    if step.get("type") != _TEMPLATE:
        return step
    names = _leading(step["single"])
    single = step["single"][len(names) :]
    pair = list(step["pair"])
    for start in reversed(range(len(pair))):  # before each of two texts
        if _leading(pair[start:])[: len(names)] == names and "Sequence" in (pair[start + len(names) :] or [{}])[0]:
            del pair[start : start + len(names)]
    if all("Sequence" in piece for piece in (*single, *pair)):
        return None
    return {**step, "single": single, "pair": pair}


def _with_tokens(piece: dict[str, Any], tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a piece of a template for two texts, with the tokens before it if it is a text."""
    if "Sequence" not in piece:
        return [piece]
    return [*(_special(token, piece["Sequence"]["type_id"]) for token in tokens), piece]


def _special(token: str, kind: int = 0) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}


def _sequence(name: str, kind: int = 0) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}


def _entries(tokens: Mapping[str, int]) -> dict[str, Any]:
    return {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in tokens.items()}

"""Pydantic's validation errors in terms of the config: the key, the expected value, and the nearest known key."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.config.base import FUNCTION_PATTERN
from headway.config.loading.document import Entry
from headway.config.loading.foreign_keys import sentences
from headway.config.loading.reference import line_of, sections_of
from headway.config.schema import NAME_PATTERN, Config
from headway.config.sections.cost import OFFER_PATTERN
from headway.config.sections.track import TRACKIO_PATTERN
from headway.core.errors import ConfigError

#: Likeness (`difflib`) from which a name is taken for a misspelt one: in its section, and in another. Names that mean
#: other things, such as `output_dir` and `output_bias`, are up to 0.76 alike.
_ALIKE = 0.77
_ALIKE_ELSEWHERE = 0.85

#: Descriptions of patterns.
_PATTERNS = {
    NAME_PATTERN: "should be letters, digits, '.', '_' and '-', the first a letter or digit",
    FUNCTION_PATTERN: "should be package.module:function",
    TRACKIO_PATTERN: "should be letters, digits, '_' and '-'",
    OFFER_PATTERN: "should be cloud/region/instance/spot, or .../on-demand, as `headway prices` lists them",
}


def complaints(tree: Entry, error: ValidationError, model: type[BaseModel] = Config) -> list[ConfigError]:
    """Return one problem for each wrong key of a model, in the order of its schema; `where` holds dotted keys."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key_of(tree, detail), []).append(detail)
    return [_complaint(tree, key, details, model) for key, details in by_key.items()]


def quoted_override(key: str, text: str) -> str:
    """Quote an override for a shell and for YAML, so that its value is read as this text."""
    return shlex.quote(f"{key}={json.dumps(text, ensure_ascii=False)}")


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of the schema, sections included."""
    for name, info in model.model_fields.items():
        if (prefix, name) == ("", "segments"):
            continue  # written by Headway only
        yield prefix + name
        for kind in sections_of(info.annotation):
            yield from known_keys(kind, f"{prefix}{name}.")


def _key_of(tree: Entry, detail: Mapping[str, Any]) -> str:
    """Return the dotted key as a person wrote it; pydantic adds the members of a union that it has tried."""
    entry = tree
    key = []
    for part in detail["loc"]:
        below = entry.child(part)
        if below is None:
            continue
        entry = below
        key.append(str(part))
    if detail["type"] == "missing":
        key.append(str(detail["loc"][-1]))
    return ".".join(key)


def _complaint(tree: Entry, key: str, details: list[Mapping[str, Any]], model: type[BaseModel]) -> ConfigError:
    kind = details[0]["type"]
    context = details[0].get("ctx", {})
    if kind == "extra_forbidden":
        return ConfigError(f"unknown key '{key}'", where=key, fix=suggestion(key, model))
    if kind == "conflict":
        keys = [f"{key}.{name}" for name in context["keys"]] or [key]
        return ConfigError(f"{key}: {context['text']}", where=", ".join(keys))
    if kind == "union_tag_invalid":
        names = re.findall(r"'([^']*)'", context["expected_tags"])
        near = difflib.get_close_matches(context["tag"], names, n=1)
        nearest = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
        name = context["discriminator"].strip("'")
        return ConfigError(f"{key}: there is no {name} '{context['tag']}'", where=key, fix=nearest)
    if kind == "union_tag_not_found":
        name = context["discriminator"].strip("'")
        return ConfigError(f"{key}: '{name}' is missing, which says what this is", where=key, fix=f"give {key}.{name}")
    if kind == "missing":
        return ConfigError(f"{key} is missing", where=key, fix=f"give {key}")
    given = details[0]["input"]
    first, *others = dict.fromkeys(_wanted(detail) for detail in details)
    wanted = " or ".join([first, *(other.removeprefix("should be ") for other in others)])
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float)) and str(given) not in wanted else ""
    fix = _as_text(key, tree.nearest(key)) if kind in ("string_type", "path_type") else None
    if kind == "choice" and (near := difflib.get_close_matches(str(given), context["names"], n=1)):
        fix = f"did you mean {near[0]}?"
    return ConfigError(f"{key or 'the config'}: {wanted}{shown}", where=key, fix=fix or line_of(key, model))


def _as_text(key: str, given: Entry) -> str | None:
    """Return the fix that makes YAML read a plain value as text; None if there is no plain value."""
    if not given.text:
        return None
    if given.place.startswith("override "):
        return f"quote it for YAML too: {quoted_override(key, given.text)}"
    return f'quote it: "{given.text}"'


def _wanted(detail: Mapping[str, Any]) -> str:
    if detail["type"] in ("model_type", "dict_type"):
        return "must be a section of keys and values"
    if detail["type"] == "path_type":
        return "should be a path"
    if detail["type"] == "string_pattern_mismatch":
        pattern = detail["ctx"]["pattern"]
        return _PATTERNS.get(pattern, f"should match the regular expression {pattern}")
    message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
    # "Input should be a valid integer, unable to parse string as an integer": the first half is enough.
    return re.sub(r"^Input should (.*?)(, (unable|got) .*)?$", r"should \1", message)


def suggestion(key: str, model: type[BaseModel] = Config) -> str | None:
    """Suggest what an unknown key was meant to be: the section it belongs to, or the key with the nearest name."""
    known = list(dict.fromkeys(known_keys(model)))  # sections of several kinds share names
    *path, last = key.split(".")
    section = ".".join(part for part in path if not part.isdecimal())
    if model is Config and key == "base":  # the loader removes it from a file before keys are checked
        return "overrides come on top of a config: give the preset in its place, or write `base:` in a file"
    if model is Config and last in sentences():
        return sentences()[last]
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    # Steps of one source have the keys of those for all.
    places = (other for other in known if not other.startswith("data.sources.clean."))
    elsewhere = [other for other in places if other.rpartition(".")[2] == last]
    # `train.step` is a typing error in the right section, though a cleaning step has a key of that name.
    cutoff = _ALIKE_ELSEWHERE if elsewhere else _ALIKE
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=cutoff)
    near = near or [other for other in siblings if sorted(other) == sorted(last)]  # `nmae`: letters changed places
    if near:
        return f"did you mean {'.'.join(filter(None, (section, near[0])))}?"
    if elsewhere:
        return f"it lives at {' or '.join(elsewhere)}"
    names = [other.rpartition(".")[2] for other in known]
    near = difflib.get_close_matches(last, names, n=1, cutoff=_ALIKE_ELSEWHERE)
    if near:
        return f"did you mean {' or '.join(other for other in known if other.rpartition('.')[2] == near[0])}?"
    near = difflib.get_close_matches(last, sentences(), n=1, cutoff=_ALIKE_ELSEWHERE)
    if near and model is Config:
        return sentences()[near[0]]
    return f"known keys here: {', '.join(siblings)}" if siblings else None

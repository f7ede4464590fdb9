"""The reference in Markdown and the JSON Schema, both generated from the schema, so that they are never out of date."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from headway.config.base import FUNCTION_PATTERN, Section
from headway.config.schema import Config
from headway.config.specs import Choices
from headway.config.units import COUNTS, Interval

#: A link to another page, in brackets of its own; a terminal cannot follow it.
_LINK = re.compile(r" ?\(\[[^\]]*\]\([^)]*\)\)|; \[[^\]]*\]\([^)]*\)")
_REQUIRED = "required"
#: A value for a key without a default, by what its type contains.
_VALUES = {"interval": "10 min", "count": "64k", "list": "[...]", "number": "0.1", "integer": "8", "path": "folder"}
_HEAD = """# Config reference

Written by `headway config schema --markdown`; do not edit. Values can be overridden on the command line, for example
`headway train config.yaml train.steps=50`. Counts take `k`, `M`, `B`, `T` (powers of 1000) and `Ki`, `Mi`, `Gi`, `Ti`
(powers of 1024); in lengths of rows and contexts `k` is 1024 too, so `2k` is 2048. Intervals are `500 steps`,
`1B tokens` or `10 min`. `base:` names a file or a built-in preset whose values this config starts from.
`headway config explain KEY` shows one key.
"""


def reference() -> str:
    """Write all keys as Markdown tables, one for each section, with a final line break."""
    parts = [_HEAD, _table("Top level", Config, "")]
    for name, info in Config.model_fields.items():
        if name == "segments":
            continue  # written by Headway only
        parts += [_table(title, model, prefix) for title, model, prefix in _sections(info, name)]
    return "\n".join(parts) + "\n"


def json_schema() -> dict[str, Any]:
    """Build the JSON Schema of a config file, for editors: with `base`, and with short forms of sources and steps."""
    schema = Config.model_json_schema(schema_generator=_SchemaGenerator)
    base = {
        "type": "string",
        "description": "File relative to this one, or built-in preset, that this config starts from.",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    for model in _models(Config):
        described = schema if model is Config else schema["$defs"][model.__name__]
        for name, text in descriptions(model).items():
            described["properties"][name]["description"] = text
    data = schema["$defs"]["DataConfig"]["properties"]
    steps = schema["$defs"]["DecontaminateStep"]["properties"]
    kinds = data["clean"]["items"]["discriminator"]["mapping"].items()
    whole = [name for name, place in kinds if not schema["$defs"][place.rpartition("/")[2]].get("required")]
    _accept_names(data["clean"], {"enum": whole})
    _accept_names(data["sources"], {"type": "string"})
    _accept_names(steps["sets"], {"type": "string"})
    _accept_names(schema["properties"]["track"], {"type": "string"})
    # `module:Class` with its arguments.
    schema["$defs"]["TrackConfig"]["patternProperties"] = {FUNCTION_PATTERN: {"type": ["object", "null"]}}
    for model in _models(Config):
        described = schema if model is Config else schema["$defs"][model.__name__]
        for name in model.may_be_empty() if issubclass(model, Section) else ():
            field = described["properties"][name]
            notes = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
            described["properties"][name] = {"anyOf": [field, {"type": "null"}], **notes}
    return schema


def _accept_names(field: dict[str, Any], name: dict[str, Any]) -> None:
    """Allow one section in place of a list of sections, and a name in place of a section."""
    item = {"anyOf": [name, field.pop("items")]}
    array = {"type": field.pop("type"), "items": item}
    if "minItems" in field:
        array["minItems"] = field.pop("minItems")
    field["anyOf"] = [array, *item["anyOf"]]


class _SchemaGenerator(GenerateJsonSchema):
    """A generator that shows the defaults of intervals as people write them."""

    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Interval) else super().encode_default(dft)


def _sections(info: FieldInfo, path: str) -> Iterator[tuple[str, type[BaseModel], str]]:
    for model in sections_of(info.annotation):
        # The key `step` distinguishes several kinds of a section: `step: length`.
        kind = model.model_fields.get("step")
        yield f"`{path}`" + (f", `step: {kind.default}`" if kind else ""), model, f"{path}."
        for name, child in model.model_fields.items():
            yield from _sections(child, f"{path}.{name}")


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a section and all sections below it."""
    children = {child for info in model.model_fields.values() for child in sections_of(info.annotation)}
    return {model}.union(*(_models(child) for child in children))


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a section's fields, by field.

    They are read from the source on demand: pydantic would read them in every command, at a twentieth of a second.
    """
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not (issubclass(owner, BaseModel) and owner.__module__.startswith("headway.")):
            continue
        body = _classes(owner.__module__)[owner.__name__].body
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def sections_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field may hold, including those in lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from sections_of(argument)


def line_of(key: str, model: type[BaseModel] = Config) -> str | None:
    """Return what the reference says of a dotted key, in one line of plain text; None if it has no line, or different
    ones in several kinds of a section.

    List positions in the key count for nothing: `data.sources.0.weight` is the key of any source.
    """
    entries = explain(key, model)
    if len(entries) != 1 or entries[0].below:  # a section has a table of its own
        return None
    entry = entries[0]
    given = entry.default if entry.default == _REQUIRED else f"default {entry.default}"
    return f"{key} ({entry.type}; {given}): {entry.meaning}"


@dataclass(frozen=True)
class KeyEntry:
    """What the reference says of a key, in plain text."""

    type: str
    default: str
    meaning: str
    example: str
    """A value, as it is written in an override."""
    below: tuple[str, ...] = ()
    """The keys of a section."""


def explain(key: str, model: type[BaseModel] = Config) -> list[KeyEntry]:
    """Return what the reference says of a dotted key: one entry, several if kinds of a section differ, none if there is
    no such key. List positions count for nothing, as in `line_of`."""
    *path, name = (part for part in key.split(".") if not part.isdecimal())
    owners = [model]
    for part in path:
        fields = (owner.model_fields[part] for owner in owners if part in owner.model_fields)
        owners = [section for info in fields for section in sections_of(info.annotation)]
    return list(dict.fromkeys(_entry(owner, name) for owner in owners if name in owner.model_fields))


def _entry(owner: type[BaseModel], name: str) -> KeyEntry:
    info = owner.model_fields[name]
    meaning = _plain(_LINK.sub("", _meaning(info, descriptions(owner).get(name))))
    default = _default(info)
    below = dict.fromkeys(child for section in sections_of(info.annotation) for child in section.model_fields)
    return KeyEntry(_plain(_field_type(info)), default, meaning, _example(info, default, meaning), tuple(below))


def _plain(cell: str) -> str:
    return cell.replace("\\|", "|")


def _example(info: FieldInfo, default: str, meaning: str) -> str:
    """Return a value for a key: one that its text names, another choice than the default, or one of its type."""
    kind = _field_type(info)
    if named := re.search(r"e\.g\. `([^`]+)`", meaning):
        return str(named[1])
    choices = [choice for choice in re.findall(r"`([^`]+)`", kind) if f"`{choice}`" != default]
    if choices and kind.startswith("`"):
        return str(choices[0])
    if kind == "boolean":
        return "true" if default == "`false`" else "false"
    if default.startswith("`"):
        return default.strip("`")
    return next((value for word, value in _VALUES.items() if word in kind), "...")


def _table(title: str, model: type[BaseModel], prefix: str) -> str:
    texts = descriptions(model)
    rows = [
        f"| `{prefix}{name}` | {_field_type(info)} | {_default(info)} | {_meaning(info, texts.get(name))} |"
        for name, info in model.model_fields.items()
        if not list(sections_of(info.annotation)) or prefix
    ]
    intro = _cell((model.__doc__ or "").strip())
    return "\n".join([f"\n## {title}\n\n{intro}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _field_type(info: FieldInfo) -> str:
    for mark in info.metadata:
        if isinstance(mark, Choices):
            return " \\| ".join(f"`{name}`" for name in mark.names)
    return "count" if _is_count(info.metadata) else _type(info.annotation)


def _is_count(marks: Iterable[Any]) -> bool:
    return any(mark in COUNTS for mark in marks)


def _type(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        return "count" if _is_count(annotation.__metadata__) else _type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        return " \\| ".join(dict.fromkeys(_type(member) for member in members))
    if typing.get_origin(annotation) in (list, tuple):
        inner = ", ".join(dict.fromkeys(_type(a) for a in typing.get_args(annotation) if a is not Ellipsis))
        return f"list of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if kind := annotation.model_fields.get("step"):
            return f"`{kind.default}`"
        return annotation.__name__.removesuffix("Config").removesuffix("Step").lower()
    names = {int: "integer", float: "number", bool: "boolean", str: "text", Interval: "interval"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return _REQUIRED
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    if isinstance(value, BaseModel):
        return "see below"
    if value == []:
        return "none"
    if isinstance(value, list) and all(isinstance(item, BaseModel) for item in value):
        return "`" + ", ".join(str(getattr(item, "path", item)) for item in value) + "`"
    # As written in a config or an override: `false`, `[0.9, 0.95]`.
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _meaning(info: FieldInfo, text: str | None) -> str:
    sections = [model.__doc__ or "" for model in sections_of(info.annotation)]
    return _cell(text or "".join(sections))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""YAML as a tree in which every value knows the line or the override that it came from.

Scalars follow YAML 1.2, which reads `1e-4` as a number and `off`, `12:30` and `2024-01-01` as text, where PyYAML's
YAML 1.1 sees text, false, 750 and a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import yaml

from headway.core.errors import ConfigError
from headway.core.files.foreign import DEPTH
from headway.core.format import printable

#: Most values of a config. They suffice for tens of thousands of sources; PyYAML takes 10 seconds and 200 MB for them.
_MOST_VALUES = 250_000
#: Most digits that Python accepts in an integer.
_MOST_DIGITS = 4300


@dataclass
class Entry:
    """One value with its place: a mapping of names to entries, a list of entries, or a plain value."""

    value: Any
    place: str
    text: str | None = None
    """A plain value as it was written."""

    def plain(self) -> Any:
        """Return the values without their places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def child(self, part: str | int) -> Entry | None:
        """Return the entry under a name or at a list position (from 0), if there is one."""
        if isinstance(self.value, list) and str(part).isdecimal() and int(part) < len(self.value):
            item: Entry = self.value[int(part)]
            return item
        return self.value.get(part) if isinstance(self.value, dict) else None

    def nearest(self, key: str) -> Entry:
        """Return the entry under a dotted key, or the nearest existing section above it."""
        entry = self
        for part in key.split("."):
            below = entry.child(part)
            if below is None:
                break
            entry = below
        return entry

    def place_of(self, key: str) -> str:
        """Return where a dotted key, or the nearest existing section above it, was given."""
        return self.nearest(key).place


def merged(below: Entry, above: Entry) -> Entry:
    """Merge an entry over another: mappings key by key; other values, lists included, are replaced.

    An empty section changes nothing, but an explicit `null` does.
    """
    if isinstance(below.value, dict) and above.value is None and not above.text:
        return below
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    values = dict(below.value)
    for key, child in above.value.items():
        values[key] = merged(values[key], child) if key in values else child
    return Entry(values, above.place)


def parse(text: str, name: str, *, lines: bool = True) -> Entry:
    """Parse one YAML document into a tree.

    Args:
        text: The document.
        name: File name, or a description of where the text comes from.
        lines: Whether places get a line number.

    Raises:
        ConfigError: not YAML, a duplicate key, a tag for more than plain data, or an alias to itself.
    """
    try:
        return _Loader(text, name, lines).tree()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark and lines else name
        raise ConfigError(
            f"this is not YAML: {error.problem}", where=where, fix="check quotes and indentation"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", where=name, fix="remove odd characters") from None
    except RecursionError:
        raise ConfigError("nested too deeply, or an alias (*name) within itself", where=name, fix="unfold it") from None


def to_yaml(values: Any) -> str:
    """Write plain values as YAML that `parse` and YAML 1.1 readers read alike; control characters are escaped."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    if printable(text, keep="\n") != text:
        text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)
    return text


class _Loader(yaml.SafeLoader):
    """A loader of plain data with the scalars below in place of YAML 1.1's.

    The number of values is limited: with nested aliases, a few lines can expand to more than fits into memory.
    """

    def __init__(self, text: str, name: str, lines: bool) -> None:
        super().__init__(text)
        self._name = name
        self._lines = lines
        self._nodes = self._values = 0

    def tree(self) -> Entry:
        """Return the tree of the only document."""
        node = self.get_single_node()
        return Entry(None, self._name) if node is None else self._entry(node, 0)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node, within the limit on values."""
        self._nodes += 1
        if self._nodes > _MOST_VALUES:
            raise self._too_many(self._place(parent) if parent is not None else self._name)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """Limit the depth of `[` and `{`: at every token, PyYAML scans all that are open."""
        if self.flow_level >= DEPTH:
            raise RecursionError
        super().fetch_flow_collection_start(TokenClass)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge the mappings that `<<` names below a mapping's own keys, which win.

        Each key is then kept once, since merged mappings may merge others themselves.
        """
        self._check_keys(node)
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for named in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(named, yaml.MappingNode):
                        self.flatten_mapping(named)
                        self._count(named, len(named.value) + 1)
        super().flatten_mapping(node)
        # An alias brings a mapping here again, so its keys must be unique then.
        node.value = list({key.value: (key, value) for key, value in node.value}.values())

    def _check_keys(self, node: yaml.MappingNode) -> None:
        given: dict[str, str] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                fix = "check brackets and question marks"
                raise ConfigError("a key must be a word", where=self._place(key), fix=fix)
            if key.value in given:
                where = f"{given[key.value]} and {self._place(key)}"
                raise ConfigError(f"'{key.value}' is given twice", where=where, fix="keep one")
            given[key.value] = self._place(key)

    def _entry(self, node: yaml.Node, depth: int) -> Entry:
        self._count(node, 1)
        place = self._place(node)
        if depth > DEPTH:
            raise RecursionError  # before Python does: other code recurses through this tree too
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            self.flatten_mapping(node)
            values = {
                key.value: replace(self._entry(value, depth + 1), place=self._place(key)) for key, value in node.value
            }
            return Entry(values, place)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return Entry([self._entry(item, depth + 1) for item in node.value], place)
        if isinstance(node, yaml.ScalarNode):
            return Entry(self._scalar(node, place), place, node.value)
        raise ConfigError(f"a config holds plain data only, not {node.tag}", where=place, fix="remove the tag")

    def _scalar(self, node: yaml.ScalarNode, place: str) -> Any:
        try:
            if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MOST_DIGITS:
                raise ValueError("too long")
            return self.construct_object(node)
        except (ValueError, KeyError, OverflowError):  # `!!int abc`, or a number with thousands of digits
            what = f"'{node.value:.40}' is not a valid {node.tag.removeprefix('tag:yaml.org,2002:')}"
            raise ConfigError(what, where=place, fix="correct it, or quote it if it is text") from None

    def _count(self, node: yaml.Node, values: int) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            raise self._too_many(self._place(node))

    def _too_many(self, place: str) -> ConfigError:
        what = f"more than {_MOST_VALUES:,} values, including those that aliases (*name) expand to"
        return ConfigError(what, where=place, fix="name folders and patterns instead of single files")

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}" if self._lines else self._name


_Loader.yaml_implicit_resolvers = {}


# The C implementation, if PyYAML has it, gives equal output ten times as fast. The C loader is not used, since deeply
# nested lists crash it.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes text which either version of YAML would read as another type."""


#: YAML 1.2.2, section 10.3.2, except that numbers with leading zeros stay text and `1_000` is a number.
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    "float": (
        r"(?![-+]?0[0-9]+$)[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
for _name, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)

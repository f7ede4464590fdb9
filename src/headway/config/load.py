"""From YAML files and overrides to a checked, complete config; every complaint has a file and a line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from headway.config.schema import Config
from headway.core.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"

#: A key's path: section names and list positions.
KeyPath = tuple[str | int, ...]


@dataclass
class _Tree:
    """Plain values with the place that each key came from."""

    values: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place_of(self, path: KeyPath) -> str:
        """Where a key was given; for one that is missing, the section it belongs to."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, "the config")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config, merge what it is based on, apply overrides, check everything, and fill in what follows.

    Args:
        path: A YAML file, or the name of a built-in preset.
        overrides: `key.path=value` strings with YAML values; later ones win.

    Raises:
        ConfigError: with every problem found, the places, and the nearest known keys.
    """
    tree = _read(_find(str(path), None), ())
    for text in overrides:
        _apply_override(tree, text)
    return _validated(tree)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """A config with overrides applied, checked and completed again.

    Raises:
        ConfigError: an override is wrong.
    """
    tree = _Tree(config.model_dump(mode="json", exclude_unset=True))
    for text in overrides:
        _apply_override(tree, text)
    return _validated(tree)


def dump_config(config: Config) -> str:
    """The config as YAML; loading it gives an equal one."""
    values = config.model_dump(mode="json")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _validated(tree: _Tree) -> Config:
    try:
        return Config.model_validate(tree.values).resolved()
    except ValidationError as error:
        raise _complaint(tree, error) from None
    except ValueError as error:
        raise ConfigError(str(error), where=tree.place_of(("train",)), fix="see docs/config-reference.md") from None


# Reading YAML ---------------------------------------------------------------------------------------------------------


def _find(name: str, beside: Path | None) -> Path:
    """A file, or a built-in preset by name; a `base:` is looked up beside the file that names it."""
    path = (beside.parent / name) if beside else Path(name)
    if path.is_file():
        return path
    preset = PRESETS / f"{name}.yaml"
    if preset.is_file():
        return preset
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if path.is_dir():
        raise ConfigError("a folder, not a config file", where=str(path), fix=f"did you mean {path / 'config.yaml'}?")
    raise ConfigError(
        "there is no such config file",
        where=f"base of {beside}: {path}" if beside else str(path),
        fix=f"give a YAML file, or a built-in preset: {', '.join(known)}",
    )


def _read(path: Path, seen: tuple[Path, ...]) -> _Tree:
    """One file on top of what it is based on."""
    if path.resolve() in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(f"a config is based on itself: {chain}", where=str(path), fix="remove one `base:`")
    tree = _parse(path)
    base = tree.values.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(
            "`base` must be one file or preset name", where=tree.place_of(("base",)), fix="base: quickstart"
        )
    below = _read(_find(base, path), (*seen, path.resolve()))
    return _Tree(_merge(below.values, tree.values), {**below.places, **tree.places})


def _merge(below: Any, above: Any) -> Any:
    """Mappings merge key by key; anything else, lists too, is replaced."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{key: _merge(below.get(key), value) for key, value in above.items()}}
    return above


def _parse(path: Path) -> _Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config: {error}", where=str(path), fix="check the file") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        places: dict[KeyPath, str] = {}
        if node is not None:
            _walk(node, (), path, places)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(
            f"this is not YAML: {error.problem}", where=where, fix="check indentation and colons"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}", where=str(path), fix="check for odd characters") from None
    if not isinstance(values, dict):
        what = "the config is empty" if values is None else "the config must be a mapping of keys to values"
        raise ConfigError(what, where=str(path), fix="begin with `base: quickstart`")
    return _Tree(values, places)


def _walk(node: yaml.Node, path: KeyPath, file: Path, places: dict[KeyPath, str]) -> None:
    """Note the line of every key, and refuse keys that are given twice."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*path, str(key_node.value))
            place = f"{file}:{key_node.start_mark.line + 1}"
            if key in places:
                raise ConfigError(
                    f"'{_dotted(key)}' is given twice", where=f"{places[key]} and {place}", fix="keep one"
                )
            places[key] = place
            _walk(value_node, key, file, places)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[(*path, index)] = f"{file}:{item.start_mark.line + 1}"
            _walk(item, (*path, index), file, places)


# Overrides ------------------------------------------------------------------------------------------------------------


def _apply_override(tree: _Tree, text: str) -> None:
    place = f"override '{text}'"
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError("an override has the form key.path=value", where=place, fix="for example train.steps=50")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise ConfigError(
            "the value of an override is not YAML", where=place, fix=f"quote it: {name}='\"...\"'"
        ) from None
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
    target: Any = tree.values
    for depth, part in enumerate(path[:-1]):
        following = _child(target, part)
        if not isinstance(following, (dict, list)):
            if not isinstance(target, dict):
                raise _no_such_item(path[: depth + 1], place)
            following = target[part] = {}
        target = following
    last = path[-1]
    if isinstance(target, list):
        if not isinstance(last, int) or last >= len(target):
            raise _no_such_item(path, place)
        target[last] = value
    else:
        target[str(last)] = value
    for depth in range(1, len(path)):
        tree.places.setdefault(path[:depth], place)
    tree.places[path] = place


def _child(target: Any, part: str | int) -> Any:
    if isinstance(target, list):
        return target[part] if isinstance(part, int) and part < len(target) else None
    return target.get(part)


def _no_such_item(path: KeyPath, place: str) -> ConfigError:
    return ConfigError(f"there is no list item '{_dotted(path)}'", where=place, fix="give the whole list instead")


# Complaints -----------------------------------------------------------------------------------------------------------


def _complaint(tree: _Tree, error: ValidationError) -> ConfigError:
    """All problems of a validation in one error: what and where per line, and the nearest known keys."""
    problems, places, fixes = [], [], []
    for detail in error.errors():
        path = tuple(part for part in detail["loc"] if not _is_union_tag(part))
        what, fix = _explain(path, detail)
        if what not in problems:
            problems.append(what)
            places.append(tree.place_of(path))
            fixes += [fix] if fix and fix not in fixes else []
    if len(problems) == 1:
        return ConfigError(problems[0], where=places[0], fix="; ".join(fixes) or "see docs/config-reference.md")
    listed = "".join(f"\n    {what} ({place})" for what, place in zip(problems, places, strict=True))
    return ConfigError(
        f"{len(problems)} problems in the config:{listed}",
        where=", ".join(dict.fromkeys(places)),
        fix="; ".join(fixes) or "see docs/config-reference.md",
    )


def _explain(path: KeyPath, detail: Any) -> tuple[str, str | None]:
    name = _dotted(path)
    if detail["type"] == "extra_forbidden":
        return f"unknown key '{name}'", _suggestion(path)
    message = re.sub(r"^(Value error|Assertion failed), ", "", detail["msg"])
    if not name:
        return message, None
    given = detail.get("input")
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) and str(given) not in message else ""
    return f"{name}: {message}{shown}", None


def _suggestion(path: KeyPath) -> str | None:
    """The nearest known key of the same section, or the section that has this key."""
    known = list(known_keys())
    name, last = _dotted(path), str(path[-1])
    section = name.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    elsewhere = [key for key in known if key.rpartition(".")[2] == last]
    if elsewhere:
        return f"'{last}' belongs to {' or '.join(elsewhere)}"
    anywhere = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if anywhere:
        return f"did you mean {anywhere[0]}?"
    return f"known keys here: {', '.join(key.rpartition('.')[2] for key in siblings)}" if siblings else None


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of the schema, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from known_keys(kind, f"{prefix}{name}.")


def _is_union_tag(part: str | int) -> bool:
    """Pydantic names the tried member of a union in the path of its error; people did not write that."""
    return isinstance(part, str) and not re.fullmatch(r"[a-z][a-z0-9_]*", part)


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))

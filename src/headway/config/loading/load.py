"""The loader: from YAML files and overrides to a checked, complete config; every error has a file and a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headway.config.checks.contradictions import combined, find_problems
from headway.config.loading.complaints import complaints, known_keys, quoted_override, suggestion
from headway.config.loading.document import Entry, merged, parse, to_yaml
from headway.config.resolving import resolve
from headway.config.schema import Config
from headway.config.shapes import SHAPES
from headway.core.credentials.secrets import redact_argument, redact_values
from headway.core.errors import ConfigError
from headway.core.files.foreign import read_bytes, read_given_bytes
from headway.core.format import counted

PRESETS = Path(__file__).parent / "presets"
_Model = TypeVar("_Model", bound=BaseModel)

#: Largest config file that is read.
CONFIG_BYTES = 4 * 2**20
_MOST_BASES = 50
#: Most keys that an error names.
_SHOWN_KEYS = 6

_SHAPE_KEYS = sorted({"head_dim", *(key for shape in SHAPES.values() for key in shape)})

#: Alternative keys: a key that is given later, in an upper file or an override, replaces these if given earlier.
_REPLACES = {
    "cost.usd_per_hour": ["cost.offer", "telemetry.usd_per_hour"],
    "cost.offer": ["cost.usd_per_hour", "telemetry.usd_per_hour"],
    "telemetry.usd_per_hour": ["cost.usd_per_hour", "cost.offer"],
    "train.steps": ["train.tokens", "train.epochs"],
    "train.tokens": ["train.steps", "train.epochs"],
    "train.epochs": ["train.steps", "train.tokens"],
    "model.preset": ["model.from_pretrained", *(f"model.{key}" for key in _SHAPE_KEYS)],
    "model.from_pretrained": ["model.preset", "model.vocab_size", *(f"model.{key}" for key in _SHAPE_KEYS)],
}


def presets() -> dict[str, str]:
    """Return the built-in presets by name, each with the first sentence of its file, which says what it is for."""
    return {file.stem: _first_sentence(file) for file in sorted(PRESETS.glob("*.yaml"), key=lambda file: file.stem)}


def _first_sentence(file: Path) -> str:
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return text.partition(". ")[0].removesuffix(".")


def load_config(
    config: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = (), *, trains: bool = True, **keys: Any
) -> Config:
    """Read a config, merge its bases, apply overrides, check everything, and fill in derived values.

        load_config("my.yaml", steps=100, optimizer={"learning_rate": 1e-3})
        load_config({"base": "quickstart", "train.steps": 100})

    Args:
        config: A YAML file, the name of a built-in preset, a mapping with the keys of a file, or a config.
        overrides: `key.path=value` strings with YAML values; later ones win.
        trains: The config must give the length of training; otherwise `train.steps` may stay open.
        keys: Overrides as Python values. A keyword is a key of the config or its last part, where that is clear:
            `steps` is `train.steps`. A mapping changes the keys of a section that it holds.

    Raises:
        ConfigError: it has problems; the error lists all of them, with places and the nearest known keys.
    """
    tree = _given(config)
    if keys:
        tree = _over(tree, _tree_of({_meant_key(name): value for name, value in keys.items()}, "a keyword"))
    return _validated(_with_overrides(tree, overrides), trains)


def _near(name: str) -> str | None:
    of_train = suggestion(f"train.{name}") or ""
    return of_train if of_train.startswith("did you mean") else suggestion(name)


def _given(config: str | Path | Mapping[str, Any] | Config) -> Entry:
    if isinstance(config, Config):
        return _entry_of(config.model_dump(mode="json", exclude_unset=True), "the config")
    if isinstance(config, Mapping):
        return _on_base(_tree_of(config, "the mapping"), None, ())
    return _read(_find(str(config), None), ())


def _tree_of(values: Mapping[str, Any], place: str) -> Entry:
    """Return values by dotted keys as a tree."""
    tree = Entry({}, place)
    for key, value in values.items():
        entry = _entry_of(value, place)
        section = tree.child(key) if "." not in key else None
        set_entry(tree, key, entry if section is None else merged(section, entry))
    return tree


def _meant_key(name: str) -> str:
    """Return the key that a keyword stands for: the key of that name, that of `train`, or the only one elsewhere.

    Raises:
        ConfigError: there is none, or several.
    """
    known = list(dict.fromkeys(known_keys()))
    if "." in name or name in known:
        return name
    if f"train.{name}" in known:
        return f"train.{name}"
    found = [key for key in known if key.rpartition(".")[2] == name]
    if not found:
        raise ConfigError(f"unknown key '{name}'", where=f"the keyword {name}", fix=_near(name))
    if len(found) > 1:
        raise ConfigError(
            f"the keyword '{name}' could mean {counted(len(found), 'key')}",
            where=", ".join(found[:_SHOWN_KEYS]),
            fix=f'give the whole key: **{{"{found[0]}": ...}}',
        )
    return found[0]


def given_value(path: str | Path, overrides: Sequence[str], key: str) -> Any:
    """Return the value of a dotted key as the files and overrides give it, unchecked; None if they do not.

    Raises:
        ConfigError: a file cannot be read, or an override has another form.
    """
    entry: Entry | None = _with_overrides(_read(_find(str(path), None), ()), overrides)
    for part in key.split("."):
        entry = None if entry is None else entry.child(part)
    return None if entry is None else entry.plain()


def given_values(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what a file and overrides give, unchecked and without defaults.

    Raises:
        ConfigError: the file cannot be read, or an override has another form.
    """
    values: dict[str, Any] = _with_overrides(_read(_find(str(path), None), ()), overrides).plain()
    return values


def load_resolved(path: Path) -> Config:
    """Load the config in a run directory as it is, without checks that depend on this machine and its workers.

    Raises:
        ConfigError: it is not a valid config.
    """
    tree = _read(_find(str(path), None), ())
    try:
        return Config.model_validate(tree.plain())
    except ValidationError as error:
        raise combined(complaints(tree, error), tree.place_of) from None


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Apply overrides to a config, then check and complete it again.

    Raises:
        ConfigError: an override is wrong.
    """
    return load_config(config, overrides)


def dump_config(config: Config) -> str:
    """Write a config as YAML. Loading it gives an equal config, if it is resolved and so holds no credentials."""
    return to_yaml(redact_values(config.model_dump(mode="json")))


def _validated(tree: Entry, trains: bool = True) -> Config:
    try:
        config = Config.model_validate(tree.plain())
        problems = find_problems(config, trains)
    except ValidationError as error:
        problems = complaints(tree, error)
    if problems:
        raise combined(problems, tree.place_of)
    return resolve(config, trains)


# Files ----------------------------------------------------------------------------------------------------------------


def _find(name: str, named_in: Path | None) -> Path:
    """Find a file, or a built-in preset by name; a `base:` is relative to the file that names it."""
    path = (named_in.parent / name) if named_in else Path(name)
    if path.exists() and not path.is_dir():  # also a pipe: `headway train <(generate)`
        return path
    preset = PRESETS / f"{name}.yaml"
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if name in known:
        return preset
    if path.is_dir():
        inside = path / "config.yaml"
        fix = f"did you mean {inside}?" if inside.is_file() else "give a YAML file"
        raise ConfigError("a folder, not a config file", where=str(path), fix=fix)
    raise ConfigError(
        "there is no such config file",
        where=f"base of {named_in}: {path}" if named_in else str(path),
        fix=f"give a YAML file, or a built-in preset: {', '.join(known)}",
    )


def _read(path: Path, above: tuple[Path, ...]) -> Entry:
    """Read one file and merge it over its bases."""
    if path.resolve() in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise ConfigError(f"a config is based on itself: {chain}", where=str(path), fix="remove one `base:`")
    if len(above) > _MOST_BASES:
        raise ConfigError(f"more than {_MOST_BASES} configs based on each other", where=str(path), fix="merge some")
    return _on_base(_parse_file(path, read_bytes if above else read_given_bytes), path, above)


def _on_base(tree: Entry, path: Path | None, above: tuple[Path, ...]) -> Entry:
    """Merge a tree, of a file or of a mapping in Python, over the base that it names."""
    base = tree.value.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base.value, str):
        raise ConfigError("`base` must be one file or preset name", where=base.place, fix="base: quickstart")
    return _over(_read(_find(base.value, path), above if path is None else (*above, path.resolve())), tree)


def _over(below: Entry, above: Entry) -> Entry:
    _drop_replaced(below, (key for key in _REPLACES if _has(above, key)))
    return merged(below, above)


def read_document(
    path: Path, kind: str, place: str | None = None, read: Callable[[Path, int], bytes] = read_given_bytes
) -> Entry:
    """Read a YAML file that a person has named.

    Args:
        path: The file.
        kind: What it holds, in an error.
        place: What its entries say where they stand; the file when not given.
        read: Returns the content of a file up to a size.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = read(path, CONFIG_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"cannot read the {kind}: {reason}", where=str(path), fix="check the file") from None
    return parse(text, place or str(path))


def validate(tree: Entry, model: type[_Model]) -> _Model:
    """Check the values of a document that is not a config.

    Raises:
        ConfigError: something in it is wrong, with the place and the nearest known key.
    """
    try:
        return model.model_validate(tree.plain())
    except ValidationError as error:
        raise combined(complaints(tree, error, model), tree.place_of, None) from None


def _parse_file(path: Path, read: Callable[[Path, int], bytes]) -> Entry:
    tree = read_document(path, "config", read=read)
    if not isinstance(tree.value, dict):
        what = "the config is empty" if tree.value is None else "the config must be a mapping of keys to values"
        raise ConfigError(what, where=str(path), fix="begin with `base: quickstart`")
    return tree


# Overrides ------------------------------------------------------------------------------------------------------------


def _with_overrides(tree: Entry, overrides: Sequence[str]) -> Entry:
    parsed = [parse_override(text) for text in overrides]
    _drop_replaced(tree, (key for key, value in parsed if key in _REPLACES and value.value is not None))
    for key, value in parsed:
        _expand(tree, "sources", "path")
        _expand(tree, "clean", "step")
        _expand_task(tree)
        set_entry(tree, key, value)
    return tree


def parse_override(text: str) -> tuple[str, Entry]:
    """Parse `key.path=value` into a dotted key and a value.

    Raises:
        ConfigError: it has another form, or the value is not YAML.
    """
    place = f"override '{redact_argument(text)}'"
    key, equals, value = text.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError("an override has the form key.path=value", where=place, fix="for example train.steps=50")
    try:
        return key.strip(), parse(value, place, lines=False)
    except ConfigError as error:
        shown = redact_argument(text) == text
        fix = "if it is text, quote it for YAML too" + (f": {quoted_override(key.strip(), value)}" if shown else "")
        raise ConfigError(error.what, where=place, fix=fix) from None


def set_entry(tree: Entry, key: str, value: Entry) -> None:
    """Set a value under a dotted key; missing sections are created, missing list items are not."""
    *sections, last = key.split(".")
    entry = tree
    for depth, part in enumerate(sections, 1):
        below = entry.child(part)
        if below is None or not isinstance(below.value, (dict, list)):
            below = Entry({}, value.place)
            _put(entry, part, below, ".".join(sections[:depth]))
        entry = below
    _put(entry, last, value, key)


def _put(entry: Entry, part: str, value: Entry, key: str) -> None:
    if isinstance(entry.value, dict):
        entry.value[part] = value
    elif entry.child(part) is not None:
        entry.value[int(part)] = value
    else:
        raise ConfigError(
            f"there is no list item '{key}'",
            where=value.place,
            fix=f"items are numbered from 0 to {len(entry.value) - 1}; or give the whole list",
        )


def _expand(tree: Entry, name: str, key: str) -> None:
    """Expand `sources: a.jsonl` to `sources: [{path: a.jsonl}]`, so that overrides can address its keys."""
    data = tree.child("data")
    given = data.child(name) if data else None
    if given is None or given.value is None:
        return
    items = given.value if isinstance(given.value, list) else [Entry(given.value, given.place)]
    given.value = [Entry({key: item}, item.place) if isinstance(item.value, str) else item for item in items]


def _expand_task(tree: Entry) -> None:
    """Expand `task: package.module:function`, so that overrides can address `task.options`."""
    given = tree.child("task")
    if given is not None and isinstance(given.value, str):
        given.value = {"function": Entry(given.value, given.place)}


def _drop_replaced(tree: Entry, keys: Iterable[str]) -> None:
    """Drop the keys of a tree that the given keys replace."""
    for key in keys:
        for replaced in _REPLACES[key]:
            section, _, name = replaced.partition(".")
            entry = tree.child(section)
            if entry is not None and isinstance(entry.value, dict):
                entry.value.pop(name, None)


def _has(tree: Entry, key: str) -> bool:
    section, _, name = key.partition(".")
    entry = tree.child(section)
    value = entry.child(name) if entry else None
    return value is not None and value.value is not None


def _entry_of(value: Any, place: str) -> Entry:
    if isinstance(value, Mapping):
        return Entry({str(key): _entry_of(child, place) for key, child in value.items()}, place)
    if isinstance(value, list | tuple):
        return Entry([_entry_of(child, place) for child in value], place)
    return Entry(str(value) if isinstance(value, Path) else value, place)

"""What a token store is made of: one function says it of a config, a prepared store keeps it, and the two are compared.

The manifest has the settings, with hashes of the word lists and evaluation sets that they name. It must not depend on
where the text lies, so the rest of the answer (paths, limits, the tokenizer's place) is in a record beside it, which
names the manifest that it belongs to. A store of an earlier version, or one that was copied without the record, is
compared by its manifest and its description of the inputs alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headway.config.derived.identity import changed_values
from headway.config.sections.clean import CleanStep, step_settings
from headway.config.sections.data import DataConfig, stored_names
from headway.config.template import CHAT, LAYOUTS
from headway.core.credentials.secrets import redact_values
from headway.core.errors import HeadwayError
from headway.core.files.atomic import write_json
from headway.core.files.foreign import LISTING_BYTES, read_json_object, readable_json_object
from headway.core.files.hashes import fingerprint
from headway.core.functions import compare_function
from headway.core.hub import is_on_hub
from headway.data.tokenizing.files import read_tokenizer
from headway.data.tokenizing.spec import first_conflict, parse, vocabulary

#: The record of what a store was made of, in its folder.
MADE_OF = ".work/made_of.json"
# Different configs may give a store with the same bytes; so many of them are kept.
_MOST_KEPT = 16

# Keys of `data` that do not shape a store: where it lies, how fast it is made and read, how rows are taken from it, and
# how its tokens are cut into files.
_OTHER_KEYS = frozenset(
    {
        "store",
        "remote",
        "remote_options",
        "cache_bytes",
        "verify",
        "workers",
        "processes",
        "shard_bytes",
        "mixture",
        "packing",
        "document_mask",
    }
)
_OTHER_KEYS_OF_SOURCES = frozenset({"weight", "role", "max_epochs"})
# Settings of a manifest whose key in the config has another name.
_KEYS = {"special_tokens_in_text": "tokenizer.special_tokens_in_text"}


def made_of(data: DataConfig) -> dict[str, Any]:
    """Return everything in a config that shapes the store prepared from it, without credentials, by dotted key.

    A key that is not known not to shape a store counts.
    """
    values = redact_values(_shaping(data))
    names = stored_names(data.sources)
    values["sources"] = [
        {key: value for key, value in {**source, "name": name}.items() if key not in _OTHER_KEYS_OF_SOURCES}
        for name, source in zip(names, values["sources"], strict=True)
    ]
    tokenizer = values.pop("tokenizer")
    given = {"path", "pattern"} if data.tokenizer.path is not None else {"vocab_size", "training_bytes", "pattern"}
    values["tokenizer"] = {key: value for key, value in tokenizer.items() if key in given}
    values["tokenizer.special_tokens_in_text"] = tokenizer["special_tokens_in_text"]
    if not data.dedup.wanted:
        values["dedup"] = None
    return {f"data.{key}": value for key, value in values.items()}


def keep_made_of(store: Path, data: DataConfig, manifest: dict[str, Any]) -> None:
    """Add a config to the record of what a store was made of, unless it is there; others gave the same bytes."""
    values = redact_values(_shaping(data))
    others = [kept for kept in map(_shaping, _kept(store, manifest)) if kept != values]
    record = {"manifest": fingerprint(manifest), "data": [*others, values][-_MOST_KEPT:]}
    if readable_json_object(store / MADE_OF, LISTING_BYTES) != record:
        (store / MADE_OF).parent.mkdir(exist_ok=True)
        write_json(store / MADE_OF, record)


def _shaping(data: DataConfig) -> dict[str, Any]:
    return data.model_dump(mode="json", exclude=set(_OTHER_KEYS))


def _kept(store: Path, manifest: dict[str, Any]) -> list[DataConfig]:
    """Return the configs that gave a store, the newest last; none if its record belongs to another manifest."""
    try:
        record = read_json_object(store / MADE_OF, LISTING_BYTES)
        if record["manifest"] != fingerprint(manifest):
            return []
        return [DataConfig.model_validate(one) for one in record["data"]]
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return []


def differences(data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Describe how a prepared store differs from what a config says, by config keys; empty if it does not.

    No source, word list or evaluation set is read, nor is the code of a Python source, which is where text lies as a
    file is. The code of cleaning functions is compared. The tokenizer is read where a store's vocabulary came from
    another place than the config names: a model that was trained on the store brings the same one.

    Args:
        data: The config, resolved; the store is at `data.store`.
        manifest: The manifest of the store, checked.
    """
    code = [f"{key}: the code of {name} has changed" for key, name in _compared_code(data, manifest, "changed")]
    found = [_differing_from(kept, data, manifest) for kept in _kept(data.store, manifest)]
    if not found:
        return _differing_by_manifest(data, manifest) + code
    return min(reversed(found), key=len) + code


def _differing_from(kept: DataConfig, data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Return the differences between a config that gave a store and another one."""
    before = made_of(kept)
    after = made_of(data)
    same = [_same_tokenizer(data, kept), _same_begin_of_text(data, kept, manifest)]
    for key, is_same in zip(("data.tokenizer", "data.begin_of_text"), same, strict=True):
        if is_same:
            after[key] = before[key]
    for old, new in zip(before["data.sources"], after["data.sources"], strict=False):
        if _is_same_place(old["path"], new["path"]):
            new["path"] = old["path"]
        elif old["path"] != new["path"]:
            new["name"] = old["name"]  # it follows from the path, or is not the point
    return changed_values(before, after)


def unknown_code(data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Return the cleaning functions of which nothing shows whether their code is that which a store was made with."""
    return [name for _, name in _compared_code(data, manifest, "unknown")]


def _compared_code(data: DataConfig, manifest: dict[str, Any], result: str) -> Iterator[tuple[str, str]]:
    """Yield the cleaning functions whose code compares so with what a manifest has of it, with their config keys."""
    settings = manifest["settings"]
    steps = {"data.clean": (data.clean, settings.get("clean"))}
    for number, (name, source) in enumerate(zip(stored_names(data.sources), data.sources, strict=True)):
        steps[f"data.sources.{number}.clean"] = source.clean, settings.get("source_clean", {}).get(name)
    for key, (asked, described) in steps.items():
        stored = described["steps"] if described else []
        if not _same_steps(asked, stored):
            continue  # reported by the config's own keys
        for number, (step, there) in enumerate(zip(asked, stored, strict=True)):
            function = getattr(step, "function", None)
            if function is not None and compare_function(function, str(there.get("source")), key) == result:
                yield f"{key}.{number}", function


def only_adds(data: DataConfig, manifest: dict[str, Any]) -> bool:
    """Return whether a store differs from what a config says by further sources alone."""
    names = [source["name"] for source in manifest["sources"]]
    there = [source for source, name in zip(data.sources, stored_names(data.sources), strict=True) if name in names]
    return len(there) == len(names) and not differences(data.model_copy(update={"sources": there}), manifest)


def only_moves(data: DataConfig, manifest: dict[str, Any]) -> bool:
    """Return whether a store differs from what a config says by the places of its sources alone."""
    for kept in _kept(data.store, manifest):
        if len(kept.sources) == len(data.sources):
            pairs = zip(data.sources, kept.sources, strict=True)
            there = [source.model_copy(update={"path": before.path}) for source, before in pairs]
            if not differences(data.model_copy(update={"sources": there}), manifest):
                return True
    return False


def _is_same_place(old: str, new: str) -> bool:
    is_local = not any("://" in path or path.endswith(":") or path.startswith("python:") for path in (old, new))
    return is_local and Path(old).resolve() == Path(new).resolve()


def _same_tokenizer(data: DataConfig, kept: DataConfig) -> bool:
    if data.tokenizer.path is None or any(source.text_template == CHAT for source in data.sources):
        return False  # a chat template beside equal ids may be another
    return data.tokenizer.path != kept.tokenizer.path and _gives_the_same_ids(data) is True


def _same_begin_of_text(data: DataConfig, kept: DataConfig, manifest: dict[str, Any]) -> bool:
    """Return whether documents begin as they do in the store. What `auto` does, the tokenizer decides."""
    made = "always" if "begin_of_text" in manifest["tokenizer"] else "never"
    wanted = data.begin_of_text
    if wanted == "auto" and kept.begin_of_text != "auto" and data.tokenizer.path is None:
        wanted = "never"  # a trained vocabulary has no such token
    return wanted in (kept.begin_of_text, made)


def settings_json(data: DataConfig, steps: Any, own_steps: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the settings that the store's bytes depend on, besides the input and the tokenizer, for the manifest.

    Args:
        data: The config.
        steps: Its cleaning steps with everything they depend on (`describe_steps`).
        own_steps: The same of each source's own steps.
    """
    settings: dict[str, Any] = {"validation": data.validation, "bad_documents": data.bad_documents}
    if data.tokenizer.path is None:
        settings["tokenizer"] = {
            "vocab_size": data.tokenizer.vocab_size,
            "training_bytes": data.tokenizer.training_bytes,
        }
    if data.tokenizer.special_tokens_in_text:
        settings["special_tokens_in_text"] = True
    if steps:
        settings["clean"] = steps
    names = stored_names(data.sources)
    if own := {name: described for name, described in zip(names, own_steps, strict=False) if described}:
        settings["source_clean"] = own
    if data.dedup.wanted:
        settings["dedup"] = data.dedup.model_dump(mode="json")
    return settings


def source_settings(data: DataConfig, number: int) -> dict[str, Any]:
    """Return how a source's texts are found in its files, for the store's description of its inputs."""
    config = data.sources[number]
    facts: dict[str, Any] = {"name": stored_names(data.sources)[number], "field": config.field}
    if config.template is not None:
        facts["template"] = config.template
    if config.text_template in LAYOUTS:
        facts["format"] = config.format
    if config.limit is not None:
        facts["limit"] = str(config.limit)
    return facts


def _differing_by_manifest(data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Return the config keys that differ, as far as the manifest and the description of the inputs know them."""
    stored = manifest["settings"]
    wanted = settings_json(data, None)
    compared = [key for key in {**wanted, **stored} if key not in ("clean", "source_clean")]
    keys = [key for key in compared if wanted.get(key) != stored.get(key)]
    if data.tokenizer.path is not None and ("tokenizer" in keys or not is_on_hub(data.tokenizer.path)):
        same = _gives_the_same_ids(data)
        if "tokenizer" in keys and same:
            keys.remove("tokenizer")
        elif "tokenizer" not in keys and same is False:
            keys.append("tokenizer")
    found = [f"data.{_KEYS.get(key, key)}" for key in keys]
    if not _same_steps(data.clean, stored.get("clean", {}).get("steps", [])):
        found.append("data.clean")
    own = stored.get("source_clean", {})
    for name, source in zip(stored_names(data.sources), data.sources, strict=True):
        if not _same_steps(source.clean, own.get(name, {}).get("steps", [])):
            found.append(f"data.sources.*.clean of {name}")
    # The tokenizer decides what `auto` does; it is not read here, so `auto` never counts as a difference.
    if data.begin_of_text == ("never" if "begin_of_text" in manifest["tokenizer"] else "always"):
        found.append("data.begin_of_text")
    names = [source["name"] for source in manifest["sources"]]
    if names != stored_names(data.sources):
        found.append(f"data.sources (the store has {', '.join(names)})")
    else:
        found += _differing_readings(data, manifest)
    return found


def _differing_readings(data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Return the keys by which sources are read otherwise than the store's description of its inputs says."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        described = read_json_object(data.store / "inputs.json", LISTING_BYTES)["sources"]
        keys = ("field", "template", "format", "limit")
        pairs = [({key: there.get(key) for key in keys}, source_settings(data, n)) for n, there in enumerate(described)]
        return [
            f"data.sources.{number}.{key}"
            for number, (there, wanted) in enumerate(pairs)
            for key in keys
            if there[key] != wanted.get(key)
        ]
    return []


def _gives_the_same_ids(data: DataConfig) -> bool | None:
    """Return whether the ids of the store mean the same tokens in the given vocabulary; None if one cannot be read."""
    assert data.tokenizer.path is not None
    with suppress(HeadwayError):
        files = read_tokenizer(data.store / "tokenizer"), read_tokenizer(data.tokenizer.path, data.tokenizer.pattern)
        ours, theirs = (vocabulary(parse(file.content, str(file.path))) for file in files)
        return first_conflict(ours, theirs) is None
    return None


def _same_steps(steps: list[CleanStep], stored: list[dict[str, Any]]) -> bool:
    """Return whether the store's steps have the config's settings; stored steps have further keys, which may differ."""
    asked = [step_settings(step) for step in steps]
    return len(asked) == len(stored) and all(
        there == {**there, **mine} for mine, there in zip(asked, stored, strict=True)
    )

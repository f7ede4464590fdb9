"""The settings that determine a prepared store, besides its input: for the manifest, and compared with a manifest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headway.config.sections.clean import CleanStep, step_settings
from headway.config.sections.data import DataConfig, stored_names
from headway.core.errors import HeadwayError

# Settings of a manifest whose key in the config has another name.
_KEYS = {"special_tokens_in_text": "tokenizer.special_tokens_in_text"}


def settings_json(data: DataConfig, steps: Any, own_steps: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the settings that the store's bytes depend on, besides the input and the tokenizer.

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


def differing_keys(data: DataConfig, manifest: dict[str, Any]) -> list[str]:
    """Return the config keys for which `headway data prepare` would make a store that differs from a prepared one.

    It compares the config with the manifest alone: it reads no files, word lists or evaluation sets. Only where the
    store's vocabulary was trained and one is given, both are read: a model that was trained on the store brings the
    same one.
    """
    stored, wanted = manifest["settings"], settings_json(data, None)
    compared = [key for key in {**wanted, **stored} if key not in ("clean", "source_clean")]
    keys = [key for key in compared if wanted.get(key) != stored.get(key)]
    if "tokenizer" in keys and data.tokenizer.path is not None and _gives_the_same_ids(data):
        keys.remove("tokenizer")
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
    return found


def _gives_the_same_ids(data: DataConfig) -> bool:
    """Return whether the ids of the store mean the same tokens in the given vocabulary; not if one cannot be read."""
    from headway.data.tokenizing.files import read_tokenizer
    from headway.data.tokenizing.spec import first_conflict, parse, vocabulary

    assert data.tokenizer.path is not None
    with suppress(HeadwayError):
        files = read_tokenizer(data.store / "tokenizer"), read_tokenizer(data.tokenizer.path, data.tokenizer.pattern)
        ours, theirs = (vocabulary(parse(file.content, str(file.path))) for file in files)
        return first_conflict(ours, theirs) is None
    return False


def _same_steps(steps: list[CleanStep], stored: list[dict[str, Any]]) -> bool:
    """Return whether the store's steps have the config's settings; stored steps have further keys, which may differ."""
    asked = [step_settings(step) for step in steps]
    return len(asked) == len(stored) and all(
        there == {**there, **mine} for mine, there in zip(asked, stored, strict=True)
    )

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
from headway.config.loading.reference import line_of, sections_of
from headway.config.schema import NAME_PATTERN, Config
from headway.config.sections.cost import OFFER_PATTERN
from headway.config.sections.track import TRACKIO_PATTERN
from headway.core.errors import ConfigError

#: Names of these keys in other trainers.
FOREIGN = {
    "train.steps": ("max_steps", "num_steps", "iterations", "max_iters", "epochs", "num_epochs", "num_train_epochs"),
    "train.sequence_length": ("seq_len", "seq_length", "max_seq_len", "block_size", "context_length"),
    "train.global_batch": ("batch_size", "global_batch_size", "train_batch_size", "gradient_accumulation_steps"),
    "train.micro_batch": ("micro_batch_size", "per_device_train_batch_size", "mbs"),
    "train.precision": ("dtype", "bf16", "fp16", "mixed_precision"),
    "train.activation_checkpointing": ("gradient_checkpointing",),
    "train.early_stopping.patience": ("early_stopping_patience",),
    "train.early_stopping.min_delta": ("early_stopping_threshold",),
    "train.max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad", "max_norm"),
    "model.dim": ("hidden_size", "d_model", "n_embd"),
    "model.layers": ("num_layers", "n_layer", "n_layers", "num_hidden_layers"),
    "model.heads": ("num_heads", "n_head", "n_heads", "num_attention_heads"),
    "optimizer.learning_rate": ("lr", "max_lr"),
    "schedule.warmup": ("warmup_steps", "warmup_ratio", "warmup_iters"),
    "checkpoint.every": ("save_steps", "save_interval", "save_every", "interval"),
    "evaluation.every": ("eval_steps", "eval_interval", "eval_every"),
    "parallel.workers": ("gpus", "devices", "nproc_per_node", "num_gpus"),
}
OURS = {theirs: ours for ours, names in FOREIGN.items() for theirs in names}

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
    entry, key = tree, []
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
    kind, context = details[0]["type"], details[0].get("ctx", {})
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
    if model is Config and last in OURS:
        return f"did you mean {OURS[last]}?"
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    # Steps of one source have the keys of those for all.
    places = (other for other in known if not other.startswith("data.sources.clean."))
    elsewhere = [other for other in places if other.rpartition(".")[2] == last]
    # `train.step` is a typing error in the right section, though a cleaning step has a key of that name.
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.85 if elsewhere else 0.6)
    if near:
        return f"did you mean {'.'.join(filter(None, (section, near[0])))}?"
    if elsewhere:
        return f"it lives at {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(last, [other.rpartition(".")[2] for other in known], n=1)
    if near:
        return f"did you mean {' or '.join(other for other in known if other.rpartition('.')[2] == near[0])}?"
    return f"known keys here: {', '.join(siblings)}" if siblings else None

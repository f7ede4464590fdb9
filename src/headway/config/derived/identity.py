"""The identity of a run: the keys of its config that determine its mathematics, and their changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from headway.config.schema import Config
from headway.core.credentials.secrets import redact_values

#: Keys that decide where, how fast and how visibly a run proceeds, or when it stops, but not what it computes. A preset
#: of a model is a name for its shape, and tokens are counted as steps. The checkpoint keeps `parallel.threads`, since
#: its resolved value matters, not the value in the config.
_INCIDENTAL = (
    "name",
    "runs",
    "task.files",
    "data.store",
    "data.remote",
    "data.remote_options",
    "data.cache_bytes",
    "data.workers",
    "data.processes",
    "data.shard_bytes",
    "data.begin_of_text",
    "model.preset",
    "train.tokens",
    "train.epochs",
    "train.device",
    "train.early_stopping",
    "train.skip_limit",
    "train.trial_step",
    "optimizer.offload",
    "parallel",
    "checkpoint",
    "supervise",
    "evaluation",
    "health.rollback_limit",
    "health.replay_every",
    "health.watch_seconds",
    "preemption",
    "launch",
    "telemetry",
    "cost",
    "budget",
    "track",
    "callbacks",
    "segments",
)


#: Keys of sources that do not change what is computed.
_INCIDENTAL_OF_SOURCES = ("role",)

#: Keys that are newer than some runs, with the values that they had without them.
_LATER: dict[str, tuple[Any, ...]] = {
    "task": (None,),
    "task.options": ({},),
    "train.ema": (None,),
    "train.weights": ("fp32",),
    "optimizer.moments": ("fp32",),
    "model.implementation": ("auto", "native"),
    "model.trust_remote_code": (False,),
    "loss": (None,),
    "distill": (None,),
    "distill.implementation": ("auto",),
    "model.adapter": (None,),
    "model.adapter.also_trained_rate": (1.0,),
    "model.router_aux_weight": (0.0,),
    "model.neftune_alpha": (0.0,),
    "model.attention": ("auto",),
    "model.activation": ("swiglu",),
    "model.ffn_bias": (False,),
    "model.normalize_router_weights": (True,),
    "model.router_scale": (1.0,),
    "model.rope_scaling": (None,),
    "model.rotary_fraction": (1.0,),
    "model.local_rope_theta": (None,),
    "model.norm": ("rmsnorm",),
    "model.pre_norms": (True,),
    "model.post_norms": (False,),
    "model.qk_norm_over": ("head",),
    "model.attention_scale": (None,),
    "model.attention_softcap": (None,),
    "model.attention_pattern": (None,),
    "model.embedding_scale": (1.0,),
    "model.residual_scale": (1.0,),
    "model.logit_divisor": (1.0,),
    "model.logit_softcap": (None,),
    "model.qkv_bias": (False,),
    "model.output_bias": (False,),
    "model.layer_pattern": (None,),
    "model.mamba": (None,),
    "optimizer.projections": (None, "whole"),
    "schedule.start_ratio": (0.0,),
    "schedule.cooldown": (0.3,),
    "schedule.constant_ratio": (0.5,),
}

#: Keys that may be unset in configs where they have no effect, with the values that older runs have there.
_UNSET = {"model.router_z_loss": 0.001}

#: Keys of `parallel` that determine how sums of gradients are rounded, with their values that leave it to the model.
_ROUNDING = {"parallel.reduce_precision": "fp32", "parallel.compression": "none", "parallel.reduce_every": "auto"}


def identity(config: Config) -> dict[str, Any]:
    """Return the dotted keys and values that determine the mathematics of a run. The data has its own fingerprint."""
    flat = dict(_flatten(config.model_dump(mode="json"), ""))
    flat["data.sources"] = [
        {k: v for k, v in source.items() if k not in _INCIDENTAL_OF_SOURCES and (k, v) != ("clean", [])}
        for source in flat["data.sources"]
    ]
    rounding = {key: flat[key] for key, exact in _ROUNDING.items() if flat[key] != exact}
    if "parallel.compression" in rounding:
        rounding["parallel.powersgd_rank"] = flat["parallel.powersgd_rank"]
    flat |= {key: value for key, value in _UNSET.items() if flat[key] is None}
    kept = {key: value for key, value in flat.items() if not is_incidental(key)}
    return {key: value for key, value in kept.items() if value not in _LATER.get(key, ())} | rounding


def changes(old: Config, new: Config) -> list[str]:
    """Describe the differences between the identities of two configs."""
    return changed_values(identity(old), identity(new))


def changed_values(
    before: Mapping[str, Any], after: Mapping[str, Any], words: str = "{key} was {before} and is now {after}"
) -> list[str]:
    """Describe the differences between two mappings of dotted keys; what would be a credential is not shown.

    Args:
        words: How a value that differs is described.
    """
    return [
        text
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        for text in _change(key, before.get(key), after.get(key), words)
    ]


def _change(key: str, before: Any, after: Any, words: str) -> Iterator[str]:
    """Yield the differences of one value; of sections key by key, and for lists of them, such as sources, by item."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            if name not in before or name not in after or before[name] != after[name]:
                yield from _change(f"{key}.{name}", before.get(name), after.get(name), words)
        return
    lists = [before or [], after or []]
    if not all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in lists):
        yield words.format(key=key, before=_shown(key, before), after=_shown(key, after))
        return
    for number, (old, new) in enumerate(zip_longest(*lists)):
        where = f"{key}.{number}"
        if old is None or new is None:
            yield f"{where} ({_named(old or new)}) {'is new' if old is None else 'is gone'}"
            continue
        for name in [*old, *(name for name in new if name not in old)]:
            if old.get(name) != new.get(name):
                values = {"before": _shown(name, old.get(name)), "after": _shown(name, new.get(name))}
                yield words.format(key=f"{where}.{name}", **values)


def _named(item: dict[str, Any]) -> str:
    """Name a section of a list by its first identifying key."""
    return str(next((item[name] for name in ("name", "path", "step", "start") if item.get(name) is not None), "..."))


def _flatten(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, child in value.items() for pair in _flatten(child, f"{path}.{key}" if path else key)]
    return [(path, value)]


def is_incidental(key: str) -> bool:
    """Return whether a key of the config is no part of what a run computes."""
    return any(key == name or key.startswith(name + ".") for name in _INCIDENTAL)


def _shown(key: str, value: Any) -> str:
    return "not set" if value is None else str(redact_values({key: value})[key])

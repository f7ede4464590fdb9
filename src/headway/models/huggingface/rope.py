"""Rotary settings in `config.json`: `rope_parameters` (transformers 5), `rope_scaling` and `rope_theta` (4)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.config import ModelConfig
from headway.core.errors import ConfigError

_KINDS = ("linear", "llama3", "yarn")


def rotary_settings(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the rotary settings that transformers takes: `rope_scaling` comes before `rope_parameters`."""
    found = [(key, values[key]) for key in ("rope_scaling", "rope_parameters") if values.get(key)]
    for key, value in found:
        if not isinstance(value, dict):
            raise ConfigError(
                f"{key} is {value!r}, not a mapping of keys to values", where=where, fix="give a sound checkpoint"
            )
    return found[0][1] if found else {}


def partial_rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of a head that is turned, of a family that knows it."""
    rotary = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return {"rotary_fraction": rotary.get("partial_rotary_factor", values["partial_rotary_factor"])}


def from_rotary_keys(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the base of the rotary embedding and its scaling, as keys of `ModelConfig`.

    Raises:
        ConfigError: the native decoder does not compute this kind.
    """
    rotary = rotary_settings(values, where)
    keys = {"rope_theta": float(rotary.get("rope_theta", values.get("rope_theta", 10_000.0)))}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return keys
    if kind not in _KINDS:
        raise ConfigError(
            f"the rotary embedding is scaled ({kind}); the native decoder computes {', '.join(_KINDS)} only",
            where=f"{where}, rope_parameters or rope_scaling",
            fix="use a checkpoint without this rope scaling, or model.implementation=transformers",
        )
    name = "original_max_position_embeddings"
    longest = values["max_position_embeddings"]
    original = values.get(name) or rotary.get(name) or longest
    scaling: dict[str, Any] = {"kind": kind, "factor": rotary["factor"]}
    if kind == "llama3":
        scaling |= {
            "original_length": original,
            "low_frequency_factor": rotary["low_freq_factor"],
            "high_frequency_factor": rotary["high_freq_factor"],
        }
    if kind == "yarn":
        factor = rotary["factor"] if rotary["factor"] is not None else longest / original
        scaling |= {
            "factor": factor,
            "original_length": original,
            "beta_fast": rotary.get("beta_fast") or 32.0,
            "beta_slow": rotary.get("beta_slow") or 1.0,
            "attention_factor": rotary.get("attention_factor") or _attention_factor(rotary, factor),
            "truncate": rotary.get("truncate", True),
        }
    return {**keys, "rope_scaling": scaling}


def _attention_factor(rotary: Mapping[str, Any], factor: float) -> float | None:
    """Return the factor of DeepSeek's spelling, which has two coefficients; None without them."""
    top = rotary.get("mscale")
    bottom = rotary.get("mscale_all_dim")
    if not top or not bottom:
        return None
    return float((0.1 * top * math.log(factor) + 1) / (0.1 * bottom * math.log(factor) + 1))


def to_rotary_keys(config: ModelConfig, *, partial: bool) -> dict[str, Any]:
    """Return the rotary keys of `config.json`, readable by transformers 4 and 5.

    Args:
        config: A complete config.
        partial: Whether the family knows the share of a head that is turned.
    """
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.original_length is not None and scaling.kind != "linear":
            parameters["original_max_position_embeddings"] = scaling.original_length
        if scaling.kind == "llama3":
            parameters["low_freq_factor"] = scaling.low_frequency_factor
            parameters["high_freq_factor"] = scaling.high_frequency_factor
        if scaling.kind == "yarn":
            parameters |= {
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
                **({} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}),
            }
    if partial:
        parameters["partial_rotary_factor"] = config.rotary_fraction
    old = {} if scaling is None else {"rope_scaling": parameters}
    return {"rope_theta": config.rope_theta, "rope_parameters": parameters, **old}

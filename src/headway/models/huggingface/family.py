"""Describes a family of transformers to the native decoder; with what several families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config import ModelConfig


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers without experts.

    `reads` and `writes` name keys of `config.json` whose values differ from those of Llama.
    """

    model_type: str
    defaults: Mapping[str, Any]
    """Key -> default of its config class, where it differs from Llama's."""
    may: frozenset[str] = frozenset()
    """Traits that its decoders may have."""
    must: frozenset[str] = frozenset()
    """Traits that all its decoders have."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the only value that the native decoder computes."""
    reads: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Content of `config.json` -> keys of `ModelConfig`."""
    writes: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Config -> keys of `config.json`."""
    flattens: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    """Content of `config.json` -> those of its keys that are nested, as Llama has them."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Other name of a key -> the key; transformers prefers the other name where a config has both."""
    eps: str = "rms_norm_eps"
    """Key of `norm_eps`."""
    act: str = "hidden_act"
    """Key of the activation."""
    activation: str = "swiglu"
    """The activation, by its name in `ModelConfig`."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Headway's name of a weight in a layer -> Hugging Face's, where it differs from Llama's."""


def biases(values: Mapping[str, Any], *, output: bool) -> dict[str, Any]:
    """Return the biases of attention, of whose output only if the family has one there."""
    bias = bool(values.get("attention_bias"))
    return {"qkv_bias": bias, "output_bias": bias and output}


def attention_scale(values: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return the factor of attention scores, unless it is that of Llama."""
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return {} if scale == width**-0.5 else {"attention_scale": scale}

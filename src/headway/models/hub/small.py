"""A small model of the class of a large one, for what the class alone decides, before any weight is read."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import torch

from headway.config import ModelConfig
from headway.models.hub.folder import base_folder
from headway.models.hub.sizes import model_without_weights
from headway.models.hub.transformers_build import explained, load_transformers, read_config
from headway.models.hub.transformers_model import TransformersModel

#: Parameters of the largest one that is made: 256 MiB in fp32.
_MOST = 2**26
_VOCABULARY = 256
_EXPERTS = 64
#: All widths are divided by one number, so that what are products and sums of others stay so.
_DIVISORS = (64, 32, 16, 8, 4, 2, 1)
#: Keys of widths. Those below a least value, such as the states of Mamba, follow from no other.
_WIDTH = re.compile(r"(^|_)(dim|size|rank|width|embd|inner|model|ff|d_head|d_ssm)(_|$)")
_NO_WIDTH = re.compile(r"vocab|chunk|window|kernel|patch|image|batch|group")
_LEAST_WIDTH = 32
_LEAST_PART = 4
_NUMBER_OF_EXPERTS = re.compile(r"(^|_)(routed|local|num|n)_experts$")


def small_instance(config: ModelConfig) -> TransformersModel | None:
    """Make a small model of the class of a pretrained one, on the CPU with random weights, in evaluation mode.

    It has the first layers, as many as it takes to have each kind of module that the model has. The random state of
    the process stays.

    Args:
        config: Complete, of a model of transformers.

    Returns:
        The model; None if the config allows no small one that computes, or it would have more than 64M parameters.

    Raises:
        ConfigError: transformers cannot make the model itself.
    """
    whole = model_without_weights(config)
    values = read_config(config).to_dict()
    layers = _layers_of_each_kind(whole, values)
    for divisor in _DIVISORS:
        smaller = _smaller(values, layers, divisor)
        if smaller is None:
            continue
        with suppress(Exception):  # sizes that do not fit each other, in any of the ways that a class finds out
            made = _made(config, smaller, torch.device("meta"))
            if sum(p.numel() for p in made.parameters()) > _MOST:
                return None  # those that follow are larger
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = _made(config, smaller, torch.device("cpu"))
            with torch.no_grad():
                logits = made(torch.arange(8).unsqueeze(0))
            if _kinds(made) >= _kinds(whole) and bool(logits.isfinite().all()):
                return made
    return None


def _made(config: ModelConfig, values: dict[str, Any], device: torch.device) -> TransformersModel:
    assert config.from_pretrained is not None
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    with explained(folder), device:
        network = load_transformers().AutoModelForCausalLM.from_config(
            type(read_config(config)).from_dict(values), trust_remote_code=config.trust_remote_code, dtype=torch.float32
        )
        return TransformersModel(config, network).eval()


def _kinds(module: torch.nn.Module) -> set[str]:
    """Return the classes of the modules, without those of adapters."""
    names = {f"{type(part).__module__}.{type(part).__qualname__}" for part in module.modules()}
    return {name for name in names if not name.startswith("peft.")}


def _layers_of_each_kind(model: TransformersModel, values: dict[str, Any]) -> dict[int, int]:
    """Return the number of layers, and how many from the first on have every kind of layer; empty if it is unknown."""
    layers = model.layers()
    lists = [found for found in values.values() if isinstance(found, list)]
    kinds = []
    for number, layer in enumerate(layers):
        named = [str(per_layer[number]) for per_layer in lists if len(per_layer) == len(layers)]
        kinds.append((frozenset(_kinds(layer)), *named))
    return {len(layers): max(kinds.index(kind) for kind in kinds) + 1} if kinds else {}


def _smaller(values: dict[str, Any], layers: dict[int, int], divisor: int) -> dict[str, Any] | None:
    """Return the values of a config, and of those in it, with fewer layers and smaller widths; None if a width cannot
    be divided."""
    found = dict(values)
    for key, value in values.items():
        if not isinstance(key, str):
            continue  # of a table of labels
        if isinstance(value, dict) and key != "rope_parameters":
            inner = _smaller(value, layers, divisor)
            if inner is None:
                return None
            found[key] = inner
        elif isinstance(value, list) or (isinstance(value, str) and "pattern" in key):
            found[key] = value[: layers.get(len(value), len(value))]
        elif isinstance(value, int) and not isinstance(value, bool):
            number = _smaller_number(key, value, layers, divisor)
            if number is None and not key.endswith("_token_id"):
                return None
            found[key] = number
    return found


def _smaller_number(key: str, value: int, layers: dict[int, int], divisor: int) -> int | None:
    if key.endswith("_token_id"):
        return value if value < _VOCABULARY else None
    if "vocab_size" in key:
        return min(value, _VOCABULARY)
    if key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        return layers.get(value, value)
    if _NUMBER_OF_EXPERTS.search(key):
        return min(value, _EXPERTS)
    if value < _LEAST_WIDTH or not _WIDTH.search(key) or _NO_WIDTH.search(key):
        return value
    is_divided = value % divisor == 0 and value // divisor >= _LEAST_PART
    return value // divisor if is_divided else None

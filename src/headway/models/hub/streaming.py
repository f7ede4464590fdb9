"""Pretrained models that no worker holds as a whole: made without memory, cut, then read one tensor after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.config import ModelConfig
from headway.core.errors import CheckpointError
from headway.models.finite import check_finite
from headway.models.hub.folder import base_folder, is_adapter, open_folder
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.quantized import quantize
from headway.models.hub.transformers_build import (
    attention_options,
    build_transformers_model,
    explained,
    load_transformers,
    read_config,
    with_adapter,
)
from headway.models.hub.transformers_model import TransformersModel
from headway.models.huggingface.checkpoint import read_tensor, stored_type, weight_files
from headway.models.no_values import NoFirstValues

#: What peft and this package put into the name of a tensor of the pretrained model.
_WRAPPERS = (".base_layer", ".original_module", ".modules_to_save.default")

FirstValue = Callable[[str, Sequence[int]], torch.Tensor]


def build_for_shards(config: ModelConfig, *, seed: int, precision: str) -> tuple[TransformersModel, FirstValue]:
    """Build a model on the meta device, and a function for the first value of any tensor of its state.

    The values are those of `build_transformers_model`. Tensors are read one by one where the folder names them as the
    model does. Where transformers converts them while it loads, as the experts of older folders into stacked ones, or
    refuses some of them, the first call of the function loads the whole model; only the worker that sends values to
    others calls it.

    Args:
        config: Complete.
        seed: Seed of an adapter's first values.
        precision: Value of `train.precision`, on which the type of frozen matrices depends.

    Raises:
        ConfigError, CheckpointError: as `build_transformers_model`; the returned function raises them too.
    """
    assert config.from_pretrained is not None
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    source = open_folder(config.from_pretrained, with_code=config.trust_remote_code)
    found = read_config(config)
    drawn = _DrawnOnTheHost()
    network = network_on_meta(config, found)
    with torch.device("meta"), drawn:
        model = with_adapter(config, network, seed)
    files = weight_files(folder)
    freeze_as_configured(model, precision, published=_published_type(model, files, getattr(found, "dtype", None)))
    state = model.state_dict(keep_vars=True)
    names = {name: name_in_folder(name) for name in state}
    aliases = _aliases(model)
    values = {name: value for name, p in state.items() if (value := drawn.value_of(p)) is not None}
    in_files = {
        name: next((names[alias] for alias in aliases.get(name, (name,)) if names[alias] in files), None)
        for name in state
    }
    missing = [name for name, found_name in in_files.items() if found_name is None and name not in values]
    needs_conversion = (
        (config.adapter is not None and config.adapter.method == "dora")
        or is_adapter(source)
        or any(name not in model.buffers_at_first for name in missing)
        or _has_more(model, files.keys() - set(names.values()))
    )
    if needs_conversion:
        return model, _Whole(config, seed, precision)

    def first_value(name: str, size: Sequence[int]) -> torch.Tensor:
        if name in values:
            return values[name]
        key = in_files[name]
        if key is None:
            return model.buffers_at_first[name]
        whole = read_tensor(files[key], key).float()
        if isinstance(state[name], nn.Parameter):
            check_finite([(key, whole)], files[key])
        if name.endswith((".codes", ".scales")):
            adapter = config.adapter
            assert adapter is not None and (adapter.frozen_precision == "int8" or adapter.frozen_precision == "nf4")
            whole = quantize(whole, adapter.frozen_precision)[0 if name.endswith(".codes") else 1]
        if whole.shape != torch.Size(size):
            raise CheckpointError(
                f"tensors have other sizes than config.json asks: {key}",
                where=str(folder),
                fix="fetch the checkpoint again",
            )
        return whole

    return model, first_value


def network_on_meta(config: ModelConfig, found: Any) -> Any:
    """Build the network of a config of transformers, without an adapter: parameters on the meta device, buffers not.

    Raises:
        ConfigError: transformers cannot build it.
    """
    assert config.from_pretrained is not None
    folder = base_folder(config.from_pretrained, with_code=config.trust_remote_code)
    with explained(folder), _parameters_on_meta():
        return load_transformers().AutoModelForCausalLM.from_config(
            found, trust_remote_code=config.trust_remote_code, dtype=torch.float32, **attention_options(config)
        )


def _published_type(
    model: TransformersModel, files: dict[str, Path], configured: torch.dtype | None
) -> torch.dtype | None:
    """Return the type of a folder's embeddings, which is not always that of its config.json."""
    for name, module in model.named_modules():
        key = name_in_folder(f"{name}.weight")
        if isinstance(module, nn.Embedding) and key in files and stored_type(files[key], key) != "BF16":
            return torch.float32
    return configured


def _has_more(model: TransformersModel, names: Iterable[str]) -> bool:
    """Return whether a folder has tensors that the model does not know, nor transformers leaves out for it."""
    left_out = [*(getattr(model.causal, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    return any(not any(re.search(pattern, name) for pattern in left_out) for name in names)


class _Whole:
    """The first values of a model that is loaded as a whole when the first one is asked for."""

    def __init__(self, config: ModelConfig, seed: int, precision: str) -> None:
        self._config = config
        self._seed = seed
        self._precision = precision
        self._state: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, size: Sequence[int]) -> torch.Tensor:
        if not self._state:
            model = build_transformers_model(self._config, seed=self._seed)
            freeze_as_configured(model, self._precision)
            self._state = model.state_dict()
        value: torch.Tensor = self._state[name]
        return value


class _DrawnOnTheHost(TorchFunctionMode):
    """Draws the first values of an adapter on the CPU, in the order in which peft asks for them.

    On the meta device nothing would be drawn, and generators would not advance.
    """

    def __init__(self) -> None:
        super().__init__()
        # With each value its tensor: otherwise another one may later have the number of one that is gone.
        self._drawn: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what was drawn for a tensor; None if nothing was."""
        _, value = self._drawn.get(id(tensor), (None, None))
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # Constants are not filled in by a function that can be replaced, but by these methods.
        if func in (torch.Tensor.zero_, torch.Tensor.fill_) and args[0].is_meta:
            value = func(torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:])
            self._drawn[id(args[0])] = args[0], value
        if getattr(func, "__module__", None) != "torch.nn.init":
            return func(*args, **kwargs)
        tensor = args[0] if args else kwargs["tensor"]
        with torch.device("cpu"), torch._C.DisableTorchFunction():
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
            if args:
                func(value, *args[1:], **kwargs)
            else:
                func(**{**kwargs, "tensor": value})
        self._drawn[id(tensor)] = tensor, value
        return tensor


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters have no memory, while buffers have their values.

    Buffers that are no part of the state, such as the frequencies of rotary embeddings, cannot be read from a file.
    """
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        made = module._parameters[name]
        if made is not None and made.device.type != "meta":
            module._parameters[name] = nn.Parameter(made.to("meta"), requires_grad=made.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        with NoFirstValues():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def name_in_folder(name: str) -> str:
    """Return the name that transformers gives a tensor of the model's state."""
    name = name.removeprefix("network.").removeprefix("base_model.model.")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    for part in (".codes", ".scales"):
        name = name.removesuffix(part) + ".weight" if name.endswith(part) else name
    return name


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter that has several: a folder holds a tied matrix under one of them."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {name: found for found in names.values() if len(found) > 1 for name in found}

"""The proof that a folder holds the model that it was written from: both compute the same logits.

The folder is read as others will read it: by transformers where that is installed, otherwise by the native decoder. Of
a large model only the parts outside its layers and one layer at a time are in memory, unless transformers converts
tensors while it loads them (stacked experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.config import ModelConfig
from headway.core.errors import CheckpointError
from headway.models.decoder import Decoder
from headway.models.hub.folder import is_adapter
from headway.models.hub.streaming import build_for_shards, name_in_folder, network_on_meta
from headway.models.hub.transformers_build import complete_from_transformers, read_config, with_adapter
from headway.models.hub.transformers_model import TransformersModel
from headway.models.huggingface.checkpoint import open_model
from headway.models.no_values import NoFirstValues

#: Largest distance of the logits of a folder from those of its model, relative to their length. Both have the same
#: weights and compute in fp32.
TOLERANCE = 1e-4
#: Tokens of the row that is computed.
_TOKENS = 16

#: (name, tensor of a model's state) -> the values to compute with.
Values = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FolderProof:
    """What a folder must compute before it is published."""

    folder: Path
    """Where it will be published, for messages."""
    expected: torch.Tensor
    """Logits of the model, from `logits_as_stored`."""
    trust_remote_code: bool = False
    frozen: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of an adapter that is written alone: the tensors of the model that it adapts, by their names in the state."""

    def __call__(self, building: Path) -> None:
        """Compare a folder that was written.

        Raises:
            CheckpointError: it computes something else.
            ConfigError: it cannot be loaded.
        """
        found = _logits(*self._open(building))
        check_same_logits(found, self.expected, self.folder)

    def _open(self, building: Path) -> tuple[nn.Module, Values]:
        """Return the model of the folder without values, and a function that reads them."""
        if find_spec("transformers") is None:
            config, read = open_model(building)
            with NoFirstValues():
                return Decoder(config), lambda name, _: read(name)
        given = ModelConfig(
            from_pretrained=building, implementation="transformers", trust_remote_code=self.trust_remote_code
        )
        found = read_config(given)
        given = complete_from_transformers(given, found)
        if not is_adapter(building):
            model, read_for = build_for_shards(given, seed=0, precision="fp32")
            return model, lambda name, tensor: read_for(name, tensor.shape)
        network = network_on_meta(given, found)
        shared = {name_in_folder(name): tensor for name, tensor in self.frozen.items()}
        network.load_state_dict(shared, strict=False, assign=True)
        return with_adapter(given, network, seed=0), lambda _, tensor: tensor


def check_same_logits(found: torch.Tensor, expected: torch.Tensor, folder: Path, most: float = TOLERANCE) -> None:
    """Check that two models compute the same.

    Args:
        found: Logits of what was written.
        expected: Logits of the model that it was written from.
        folder: Where it will be published, for messages.
        most: Largest distance, relative to the length of `expected`.

    Raises:
        CheckpointError: they do not, or logits are not finite.
    """
    if not torch.isfinite(expected).all():
        raise CheckpointError(
            "the model computes logits that are not finite, so it cannot be used",
            where=str(folder),
            fix="take another step: --step; `headway checkpoints list RUN` shows which there are",
        )
    distance = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    if not distance <= most:
        raise CheckpointError(
            f"what was written does not compute what the model computes: its logits are {distance:.2%} away, and"
            f" {most:.2%} is allowed; nothing was published",
            where=str(folder),
            fix="another version of transformers or peft; of an adapter `headway export` writes the adapter alone",
        )


def logits_as_stored(model: nn.Module, stored: Callable[[str], torch.dtype] | None = None) -> torch.Tensor:
    """Compute the logits of a model in fp32 for a few tokens, with its weights rounded as they will be stored.

    Args:
        model: A native decoder or a model of transformers, on any device. It stays as it is.
        stored: Name of a tensor of its state -> the type in which it will be stored; the one that it has by default.

    Returns:
        fp32 logits (1, T, V) on the CPU.
    """
    return _logits(model, lambda name, tensor: tensor.to(tensor.dtype if stored is None else stored(name)).float())


@torch.no_grad()
def probe_logits(model: nn.Module) -> torch.Tensor:
    """Compute the logits of a model for a few tokens spread over its vocabulary, as it computes: fp32, (1, T, V)."""
    config: Any = model.config
    count = min(_TOKENS, config.max_sequence_length)
    ids_BT = (torch.arange(count) * 2_654_435_761 % config.vocab_size).unsqueeze(0)
    devices = {p.device for p in model.parameters()} - {torch.device("meta")}
    was_training = model.training
    model.eval()
    try:
        with _whole_products():
            logits: torch.Tensor = model(ids_BT.to(next(iter(devices), torch.device("cpu"))))
    finally:
        model.train(was_training)
    return logits.float().cpu()


@contextmanager
def _whole_products() -> Iterator[None]:
    """Compute products and convolutions in fp32 without TF32, which GPUs use for convolutions by default."""
    cudnn: Any = torch.backends.cudnn
    convolutions = cudnn.conv.fp32_precision
    products = torch.get_float32_matmul_precision()
    cudnn.conv.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = convolutions
        torch.set_float32_matmul_precision(products)


def _logits(model: nn.Module, values: Values) -> torch.Tensor:
    """Compute `probe_logits` with other values, which are in memory only while the layer computes that needs them."""
    layers = model.layers() if isinstance(model, TransformersModel) else list(model.layers)  # type: ignore[arg-type]
    names = {module: name for name, module in model.named_modules()}
    with ExitStack() as stack:
        for layer in layers:
            around = _Around(layer, names[layer], values)
            stack.callback(layer.register_forward_pre_hook(around.enter).remove)
            stack.callback(layer.register_forward_hook(around.leave, always_call=True).remove)
        inside = {module for layer in layers for module in layer.modules()}
        stack.enter_context(_replaced(model, "", values, without=inside))
        return probe_logits(model)


class _Around:
    """Hooks that give a layer its values for the time in which it computes."""

    def __init__(self, layer: nn.Module, name: str, values: Values) -> None:
        self._layer = layer
        self._name = name
        self._values = values
        self._stack = ExitStack()

    def enter(self, *_: Any) -> None:
        """Replace the layer's tensors."""
        self._stack.enter_context(_replaced(self._layer, self._name, self._values))

    def leave(self, *_: Any) -> None:
        """Put them back."""
        self._stack.close()


@contextmanager
def _replaced(module: nn.Module, prefix: str, values: Values, without: Set[nn.Module] = frozenset()) -> Iterator[None]:
    """Replace the tensors of a module's state for the length of a block, but for those of some modules inside it."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    new: dict[int, torch.Tensor] = {}  # a tied matrix is there once
    try:
        for path, part in module.named_modules(prefix=prefix):
            if part in without:
                continue
            for tensors, key in _state_of(part):
                tensor = tensors[key]
                if id(tensor) not in new:
                    new[id(tensor)] = values(f"{path}.{key}".lstrip("."), tensor)
                before.append((tensors, key, tensor))
                tensors[key] = new[id(tensor)]
        yield
    finally:
        for tensors, key, tensor in before:
            tensors[key] = tensor


def _state_of(part: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return where the floats of a module's own state lie, parameters and persistent buffers."""
    parameters: dict[str, Any] = part._parameters
    buffers: dict[str, Any] = part._buffers
    found = [(parameters, key) for key in parameters]
    found += [(buffers, key) for key in buffers if key not in part._non_persistent_buffers_set]
    return [(place, key) for place, key in found if place[key] is not None and place[key].is_floating_point()]

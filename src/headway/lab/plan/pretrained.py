"""Parameters and activations of a model that transformers computes, in the form that the plan of a step takes.

Parameters come from the model itself, which is made on the meta device; activations from a run of it without values
(`lab/plan/trace.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import nn

from headway.config import Config, ModelConfig
from headway.config.optimizers import FP32_BYTES
from headway.core.errors import ConfigError
from headway.lab.plan.activations import Activations, LayerSizes, element_bytes, loss_bytes
from headway.lab.plan.layout import Layout
from headway.lab.plan.stages import Stage, Weight
from headway.lab.plan.trace import Trace, trace_model
from headway.models.hub.frozen import freeze_as_configured
from headway.models.hub.sizes import model_without_weights
from headway.models.hub.transformers_build import read_config
from headway.models.hub.transformers_model import TransformersModel
from headway.parallel.fsdp import wrap_units

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PretrainedStage(Stage):
    """All layers of a model of transformers; shapes are those of trained parameters, named as the decoder's are."""

    count: int = 0
    """Number of layers."""
    stored: tuple[Weight, ...] = ()
    """All parameters in the order of the model, the projection last."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters in the order of the model, frozen ones included."""
        return self.stored

    @property
    def layers(self) -> int:
        """Number of layers; some may have nothing that is trained."""
        return self.count

    @property
    def has_loss(self) -> bool:
        """Always: it has all layers, whether the projection is trained or not."""
        return True

    @property
    def down(self) -> int:
        """No matrix: gradients of matrices are among the traced temporaries."""
        return 0

    @property
    def gate_up(self) -> int:
        """Bytes of the largest matrix in layers."""
        return self.largest_hidden

    @property
    def largest_hidden(self) -> int:
        """Bytes of the largest matrix in layers."""
        return max((count for name, count in self.bytes.items() if name.startswith("layers.")), default=0)


def pretrained_stage(config: Config, model: ModelConfig) -> PretrainedStage:
    """Return the parameters of a model.

    Raises:
        ConfigError: the model cannot be made.
    """
    built, layers = _built(_Key.of(model, config))
    places = {id(module): index for index, layer in enumerate(layers) for module in layer.parameters()}
    table = built.causal.get_input_embeddings()
    projection = built.output_projection()
    copies = getattr(table, "modules_to_save", None)
    ends = {id((table if copies is None else next(iter(copies.values()))).weight): "embedding.weight"}
    if projection is not None:
        ends.setdefault(id(projection), "head.weight")
    shapes: dict[str, tuple[int, ...]] = {}
    stored: list[Weight] = []
    frozen_root = 0
    frozen_layers = [0] * len(layers)
    last_norm = next((p for p in reversed(list(built.parameters())) if p.ndim == 1 and id(p) not in places), None)
    if last_norm is not None:
        ends.setdefault(id(last_norm), "norm.weight")
    for name, p in built.named_parameters():
        index = places.get(id(p))
        name = ends.get(id(p), ("root." if index is None else f"layers.{index}.") + name)
        stored.append(Weight(name, p.numel(), p.element_size(), p.requires_grad))
        if p.requires_grad:
            shapes[name] = tuple(p.shape)
        elif index is None:
            frozen_root += p.nbytes
        else:
            frozen_layers[index] += p.nbytes
    return PretrainedStage(
        # In the order of use, as buckets of gradients are filled: the projection last.
        dict(sorted(shapes.items(), key=lambda item: item[0] == "head.weight")),
        tied=projection is not None and ends[id(projection)] == "embedding.weight" and "embedding.weight" in shapes,
        frozen_root=frozen_root,
        frozen_layers=tuple(frozen_layers),
        gathers_half=False,
        count=len(layers),
        stored=tuple(sorted(stored, key=lambda weight: weight.name == "head.weight")),
    )


def pretrained_buffers(config: Config, model: ModelConfig) -> int:
    """Return the bytes of a model's buffers."""
    built, _ = _built(_Key.of(model, config))
    return sum(buffer.nbytes for buffer in built.buffers())


def hidden_size(config: Config, model: ModelConfig) -> int:
    """Return the width of the hidden states that enter the output projection."""
    built, _ = _built(_Key.of(model, config))
    return int(built.causal.config.get_text_config().hidden_size)


def pretrained_activations(config: Config, model: ModelConfig, layout: Layout, device: str) -> Activations:
    """Return the activations of a layout's micro-batch on one worker.

    Raises:
        ConfigError: they depend on data, or the model is not divided like that.
    """
    _check_layout(config, layout)
    precision = config.train.precision
    length = config.train.sequence_length
    packed = config.data.document_mask
    key = _Key.of(model, config)
    built, _ = _built(key)
    return traced_activations(
        lambda rows, mode: _traced(key, (rows, length), mode, packed),
        layout,
        loss=lambda: _loss_bytes(built.output_projection(), layout.micro_batch * length, precision, device),
    )


def _loss_bytes(weight: torch.Tensor | None, tokens: int, precision: str, device: str) -> tuple[int, int]:
    assert weight is not None
    element = element_bytes(precision)
    in_place = weight.element_size() == element
    return loss_bytes(
        (weight.shape[0], weight.shape[1]), tokens, element, device,
        trained=weight.requires_grad, in_place=in_place,
        streams=element if in_place and weight.requires_grad else FP32_BYTES,
    )  # fmt: skip


def traced_activations(
    trace: Callable[[int, Literal["none", "selective"]], Trace], layout: Layout, loss: Callable[[], tuple[int, int]]
) -> Activations:
    """Compute the sizes for a layout's micro-batch from traces of one and of two rows.

    Args:
        trace: (rows, activation checkpointing) -> trace.
        layout: How the step is split over workers.
        loss: The bytes of the loss, forward and backward, where it is computed from hidden states.
    """
    rows = layout.micro_batch
    one, two = (trace(count, "none") for count in (1, 2))
    whole = _line(one, two, rows)
    # What a layer keeps whatever the rows: copies of its weights in half precision.
    fixed = max(0, 2 * sum(one.kept) - sum(two.kept)) // len(one.kept)
    selected = whole
    if layout.checkpointing == "selective":
        one, two = (trace(count, "selective") for count in (1, 2))
        selected = _line(one, two, rows)
    layers = len(whole.kept)
    kept = sum(whole.kept) // layers
    layer = LayerSizes(
        saved=kept - fixed,
        selected=sum(selected.kept) // layers,
        casts=fixed,
        # Where layers differ, the largest one has its backward pass while all others count as the mean.
        backward=whole.backward + max(whole.kept) - kept,
    )
    forward, backward = loss() if whole.is_projected else (whole.loss, whole.loss_backward)
    return Activations(whole.stream, layer, layer, whole.last_norm, whole.stream, forward, backward)


def _line(one: Trace, two: Trace, rows: int) -> Trace:
    """Return the bytes of any number of rows: all but copies of weights are proportional to it."""

    def at(first: int, second: int) -> int:
        return first + (second - first) * (rows - 1)

    return replace(
        one,
        kept=[at(a, b) for a, b in zip(one.kept, two.kept, strict=True)],
        backward=at(one.backward, two.backward),
        last_norm=at(one.last_norm, two.last_norm),
        stream=at(one.stream, two.stream),
        loss=at(one.loss, two.loss),
        loss_backward=at(one.loss_backward, two.loss_backward),
    )


def _check_layout(config: Config, layout: Layout) -> None:
    mesh = layout.mesh
    if max(mesh.tp, mesh.pp, mesh.cp, mesh.ep) > 1:
        raise ConfigError(
            "a model of transformers is not divided by tensor, pipeline, context or expert parallelism",
            where="parallel, model.from_pretrained",
            fix="a data-parallel strategy, with parallel.tensor, pipeline, context and expert of 1",
        )


class _Key(NamedTuple):
    """What determines a model and its parameters, for caches of them."""

    dumped: str
    precision: str
    half_weights: bool

    @classmethod
    def of(cls, model: ModelConfig, config: Config) -> _Key:
        return cls(model.model_dump_json(), config.train.precision, config.train.weights != "fp32")


@lru_cache(maxsize=2)
def _built(key: _Key) -> tuple[TransformersModel, list[nn.Module]]:
    config = ModelConfig.model_validate_json(key.dumped)
    model = copy.deepcopy(model_without_weights(config))
    freeze_as_configured(model, key.precision, published=getattr(read_config(config), "dtype", None))
    if key.half_weights:
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
    return model, wrap_units(model.causal)


@lru_cache(maxsize=16)
def _traced(key: _Key, shape: tuple[int, int], mode: Literal["none", "selective"], packed: bool) -> Trace:
    # Layers beyond a few are only copied to be thrown away, but they have no memory.
    model, layers = copy.deepcopy(_built(key))
    return trace_model(model, layers, shape, mode=mode, half=HALF.get(key.precision), packed=packed)

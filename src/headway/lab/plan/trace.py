"""Activations of a model of transformers, measured by running it on tensors without content.

There are too many architectures for a table such as that of `lab/plan/activations.py`. Forward and backward pass run on
fake tensors (`torch._subclasses.FakeTensorMode`), which have sizes and no memory, so a laptop can run 8 B parameters.
Every storage that an operation makes is counted until nothing refers to it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from headway.core.errors import ConfigError, HeadwayError, in_one_line

if TYPE_CHECKING:
    from headway.models.decoder import Decoder
    from headway.models.hub.transformers_model import TransformersModel

#: Layers that stand for all where all are alike: a first, a typical and a last one.
_FEW = 3


@dataclass(frozen=True)
class Trace:
    """Bytes in the passes of one micro-batch, besides weights and their gradients."""

    kept: Sequence[int]
    """What each layer keeps for its backward pass, including its input."""
    backward: int
    """The most that the backward pass of a layer takes besides what was there when it began."""
    last_norm: int
    """What is kept between the last layer and the output projection."""
    stream: int
    """The output of a layer."""
    is_projected: bool
    """Whether logits are projected hidden states, so that the loss is computed a chunk of rows at a time."""
    loss: int = 0
    """The most that logits and loss take, forward; unless `is_projected`."""
    loss_backward: int = 0


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages, from the operation that makes them until nothing refers to them."""

    def __init__(self, existing: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in tree_iter(result):
            if isinstance(found, torch.Tensor) and (storage := found.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.live)
        return result

    def _free(self, count: int) -> None:
        self.live -= count

    def restart(self) -> int:
        """Return the most bytes since the last call, and begin again."""
        most = self.most
        self.most = self.live
        return most


class _Passes:
    """Hooks that read the counter between the layers of both passes."""

    def __init__(
        self, model: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module], storages: LiveStorages
    ) -> None:
        self.storages = storages
        self.after: list[int] = []
        """Bytes after the embedding, and after each layer."""
        self.stream = 0
        self.starts: list[int] = []
        """Bytes when the backward pass reaches the output of each layer, the last one first, and the embedding."""
        self.peaks: list[int] = []
        """The most bytes before each of these points."""
        for module in (embedding, *layers):
            module.register_forward_hook(self._after)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_drop_gradient)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.starts:
            return  # the backward pass computes a layer again
        tensor = next(found for found in tree_iter(output) if isinstance(found, torch.Tensor))
        self.after.append(self.storages.live)
        self.stream = tensor.untyped_storage().nbytes()
        if tensor.requires_grad:
            tensor.register_hook(self._at_gradient)

    def _at_gradient(self, _: torch.Tensor) -> None:
        self.peaks.append(self.storages.restart())
        self.starts.append(self.storages.live)

    def largest_backward(self) -> int:
        """Return the most that a layer takes besides what was there when its backward pass began."""
        ends = [*self.peaks[1:], self.storages.most]
        layers = len(self.after) - 1
        return max(most - start for start, most in zip(self.starts[:layers], ends[:layers], strict=True))


def _drop_gradient(p: torch.Tensor) -> None:
    p.grad = None


def trace_model(
    model: TransformersModel,
    layers: Sequence[nn.Module],
    shape: tuple[int, int],
    *,
    mode: Literal["none", "selective"],
    half: torch.dtype | None,
    packed: bool,
) -> Trace:
    """Run one micro-batch through a model on the meta device.

    Args:
        model: Is changed, and cannot be used again.
        layers: Its layers, in order.
        shape: Rows of the micro-batch, and tokens of a row.
        mode: Activation checkpointing.
        half: The type of matrix products, if autocast casts them.
        packed: Whether attention is kept within the documents of a row, which takes a mask.

    Raises:
        ConfigError: sizes depend on values, as those of experts can that are computed one by one.
    """
    few = _shorten(model, layers)
    model.set_activation_checkpointing(mode)
    model.train()
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # what PyTorch reports about an operation is in the exception too
    autocast = nullcontext() if half is None else torch.autocast("cpu", dtype=half, cache_enabled=False)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), autocast, nullcontext() if packed else _one_document():
            model.to_empty(device="cpu")
            trace = _run(model, few, torch.zeros(shape, dtype=torch.int64))
    except HeadwayError:
        raise
    except (UnsupportedFakeTensorException, RuntimeError, NotImplementedError, ValueError) as error:
        words = in_one_line(error, 120)
        raise ConfigError(
            f"what {type(model.causal).__name__} allocates cannot be found without its values: {words}",
            where="model.from_pretrained",
            fix="train.trial_step=true tries the memory when training starts",
        ) from error
    finally:
        logging.disable(before)
    if len(few) == len(layers):
        return trace
    first, typical, last = trace.kept
    return replace(trace, kept=(first, *[typical] * (len(layers) - 2), last))


@contextmanager
def _one_document() -> Iterator[None]:
    """Keep transformers from taking rows for packed ones, as it does where positions have no values to look at."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    setattr(masking_utils, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


def _run(model: TransformersModel, layers: Sequence[nn.Module], ids: torch.Tensor) -> Trace:
    storages = LiveStorages([*model.parameters(), *model.buffers(), ids])
    is_projected = _is_projected(model, ids)
    passes = _Passes(model, model.causal.get_input_embeddings(), layers, storages)
    loss = loss_backward = 0
    with storages:
        if is_projected:
            ready = _pass_hidden(lambda: model.backbone(ids, **model.pass_options)[0], storages)
        else:
            hidden: list[int] = []
            head = model.head()
            assert head is not None
            head.register_forward_pre_hook(lambda *_: hidden.append(storages.live))
            logits = model.causal(ids, **model.pass_options).logits
            output = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="sum")
            del logits
            ready = hidden[0]
            loss = storages.restart() - ready
            output.backward()
            loss_backward = passes.peaks[0] - ready
    return replace(
        _traced(passes, ready), is_projected=is_projected, loss=max(0, loss), loss_backward=max(0, loss_backward)
    )


def _pass_hidden(forward: Callable[[], torch.Tensor], storages: LiveStorages) -> int:
    """Run forward and backward pass from ids to hidden states; return the bytes between them."""
    output = forward()
    ready = storages.live - output.untyped_storage().nbytes()  # hidden states count as a part of the loss
    # A gradient that is there anyway is a part of the loss (`lab/plan/activations.py`).
    gradient = torch.ones_like(output)
    storages.restart()
    output.backward(gradient)
    return ready


def _traced(passes: _Passes, ready: int) -> Trace:
    kept = [after - before for before, after in zip(passes.after, passes.after[1:], strict=False)]
    last_norm = ready - passes.after[-1] + passes.stream
    return Trace(kept, passes.largest_backward(), last_norm, passes.stream, is_projected=True)


def trace_decoder(
    model: Decoder, shape: tuple[int, int], *, mode: Literal["none", "selective"], half: torch.dtype | None
) -> Trace:
    """Run one micro-batch through a native decoder on the meta device; arguments as of `trace_model`."""
    model.set_activation_checkpointing(mode)
    model.train()
    autocast = nullcontext() if half is None else torch.autocast("cpu", dtype=half, cache_enabled=False)
    with FakeTensorMode(allow_non_fake_inputs=True), autocast:
        model.to_empty(device="cpu")
        ids = torch.zeros(shape, dtype=torch.int64)
        storages = LiveStorages([*model.parameters(), *model.buffers(), ids])
        passes = _Passes(model, model.embedding, model.wrap_units(), storages)
        with storages:
            ready = _pass_hidden(lambda: model.hidden_states(ids), storages)
    return _traced(passes, ready)


def _is_projected(model: TransformersModel, ids: torch.Tensor) -> bool:
    """Return whether the output of the projection is returned as it is.

    The run itself proves it with values (`TransformersModel.logits_are_projected`); without values the tensor must be
    the same one.
    """
    head = model.head()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    seen: list[torch.Tensor] = []
    handle = head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    try:
        with torch.no_grad():
            logits = model.causal(ids[:, :8], **model.pass_options).logits
    finally:
        handle.remove()
    return len(seen) == 1 and seen[0].untyped_storage()._cdata == logits.untyped_storage()._cdata


def _shorten(model: TransformersModel, layers: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Take all layers but a few out of a model whose layers are alike; return those that are left."""
    if len(layers) <= _FEW or any(_look(layer) != _look(layers[0]) for layer in layers):
        return layers
    for module in model.backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(layers) and module[0] is layers[0]:
            del module[_FEW:]
            return list(module)
    return layers


def _look(layer: nn.Module) -> Any:
    kind = getattr(layer, "attention_type", None)
    return type(layer), kind, [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]

"""The types in which the weights below an adapter are kept."""

from __future__ import annotations

import torch
from torch import nn

from headway.models.hub.quantized import QuantizedLinear, can_quantize
from headway.models.hub.transformers_model import TransformersModel


def freeze_as_configured(model: TransformersModel, precision: str, *, published: torch.dtype | None = None) -> None:
    """Keep the frozen matrices of a model in the type that `model.adapter.frozen_precision` asks for.

    Args:
        model: May be on the meta device.
        precision: Value of `train.precision`.
        published: The type of the weights in their folder, for a model without values.
    """
    adapter = model.config.adapter
    chosen = adapter.frozen_precision if adapter is not None else "auto"
    if not model.kept_elsewhere():
        return
    if chosen == "int8" or chosen == "nf4":
        # Store the matrices of frozen linear layers in few bits, but for the output projection, whose rows are
        # tokens.
        head = model.head()
        head = getattr(head, "base_layer", head)  # below an adapter
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear) or child is head or child.weight.requires_grad:
                    continue
                if can_quantize(child.weight, chosen):
                    setattr(parent, name, QuantizedLinear(child, chosen))
    if chosen != "fp32" and precision == "bf16":
        set_frozen_precision(model, torch.bfloat16, published=published)


def set_frozen_precision(network: nn.Module, dtype: torch.dtype, published: torch.dtype | None = None) -> None:
    """Keep the matrices of frozen linear layers in a type, and embeddings if that loses no bit of them.

    In the type of the matrix products this changes no result, since autocast casts them at each use anyway. What an
    embedding returns is cast back to fp32, in which activations are summed up. Norms stay in fp32.

    Args:
        published: The type of the weights in their folder, which decides where there are no values to compare.
    """
    modules = [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.requires_grad
    ]
    # An output projection may have the same matrix.
    exact = {
        id(module.weight)
        for module in modules
        if isinstance(module, nn.Embedding) and not _loses_nothing(module.weight.data, dtype, published)
    }
    for module in modules:
        if id(module.weight) in exact:
            continue
        module.weight.data = module.weight.data.to(dtype)
        if isinstance(module, nn.Embedding) and dtype != torch.float32:
            # Before the hook that adds noise, which would be rounded otherwise.
            module.register_forward_hook(lambda _, inputs, output: output.float(), prepend=True)


def _loses_nothing(whole: torch.Tensor, dtype: torch.dtype, published: torch.dtype | None) -> bool:
    if whole.dtype == dtype:
        return True
    if whole.is_meta:
        return published == dtype
    return torch.equal(whole.to(dtype).to(whole.dtype), whole)

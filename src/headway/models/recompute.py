"""Activation checkpointing: which results of a layer are kept, where, and which are recomputed.

With `selective`, kept are the outputs of attention, whose cost grows with the square of the row length, and every other
matrix product: the first, the third, and so on. Norms, activation functions, rotations and the other products are
recomputed from the layer's input. Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 5, introduced recomputing what is large and cheap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

_PRODUCTS = ("mm", "addmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
#: A wrapper of one of these kernels, and our own operator. Matched by name: importing the former imports the compiler.
_BY_NAME = ("torch_attn::_varlen_attn", "headway::causal_attention")


def _overloads(*names: str) -> frozenset[Any]:
    """Return the operators of this PyTorch version that have one of the names."""
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


PRODUCTS = _overloads(*_PRODUCTS)
ATTENTION = _overloads(*_ATTENTION)


def in_host_memory(*inputs: Any) -> Any:
    """Return a context in which the inputs of a part that is recomputed are kept in host memory, pinned for a GPU.

    Args:
        inputs: Of that part. Tensors that are cut between workers cannot be pinned.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    pins = bool(tensors) and all(type(value) is torch.Tensor and value.is_cuda for value in tensors)
    return torch.autograd.graph.save_on_cpu(pin_memory=pins)


def selective_contexts() -> tuple[Any, Any]:
    """Create the contexts of a layer's first and second pass: the `context_fn` of `torch.utils.checkpoint`."""
    seen = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in ATTENTION or operator.name() in _BY_NAME
        if operator in PRODUCTS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts

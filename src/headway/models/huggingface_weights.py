"""Names and layouts of the weights: fused here, one tensor per projection in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

#: Our name in a layer -> theirs, where the tensors are the same.
_SAME_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}


def weight_names(config: ModelConfig) -> dict[str, list[str]]:
    """Our parameter name -> the names of the tensors it holds in a Hugging Face checkpoint, in fused order."""
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tie_embeddings:
        names["head.weight"] = ["lm_head.weight"]
    for index in range(Shape.of(config).layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        same = {**_SAME_IN_LAYER, **(_QK_NORMS if config.qk_norm else {})}
        names.update({ours + mine: [theirs + other] for mine, other in same.items()})
        names[ours + "attention.qkv.weight"] = [theirs + f"self_attn.{part}_proj.weight" for part in "qkv"]
        names[ours + "feed_forward.gate_up_groups.weight"] = [
            theirs + f"mlp.{part}_proj.weight" for part in ("gate", "up")
        ]
    return names


def split_weight(name: str, tensor: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """The tensors that one of our parameters is in a Hugging Face checkpoint, in the order of `weight_names`."""
    if name.endswith("gate_up_groups.weight"):
        grouped = torch.unflatten(tensor, 0, (shape.ffn_groups, 2, -1))
        return [part.flatten(0, 1) for part in grouped.unbind(1)]
    if name.endswith("qkv.weight"):
        grouped = torch.unflatten(tensor, 0, (shape.kv_heads, shape.queries_per_group + 2, shape.head_dim))
        parts = torch.split(grouped, [shape.queries_per_group, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in parts]
    return [tensor]


def fuse_weights(name: str, tensors: list[torch.Tensor], shape: Shape) -> torch.Tensor:
    """The inverse of `split_weight`."""
    if name.endswith("gate_up_groups.weight"):
        return torch.stack([torch.unflatten(t, 0, (shape.ffn_groups, -1)) for t in tensors], dim=1).flatten(0, 2)
    if name.endswith("qkv.weight"):
        parts = [torch.unflatten(tensor, 0, (shape.kv_heads, -1, shape.head_dim)) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(0, 2)
    return tensors[0]


def to_huggingface_tensors(
    config: ModelConfig, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the Hugging Face checkpoint of a decoder with this state dict; views where possible."""
    shape = Shape.of(config)
    for name, theirs in weight_names(config).items():
        yield from zip(theirs, split_weight(name, state[name], shape), strict=True)

"""Names and layouts of the weights: fused in Headway, one tensor per projection in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from headway.models.huggingface_mixtures import MIXTRAL, mixture_architecture
from headway.models.moe import selects_with_bias
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

#: Headway's name in a layer -> Hugging Face's, where the tensors are identical.
_SAME_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
_QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}


#: Prefix of a layer's experts, and the names of the gate, up and down projections of an expert.
_MIXTRAL = ("block_sparse_moe.", ("w1", "w3", "w2"))
_OTHER_MIXTURES = ("mlp.", ("gate_proj", "up_proj", "down_proj"))
#: Name ending of a router's bias. It stays in fp32: bf16 would round its small steps away.
SELECTION_BIAS = "e_score_correction_bias"


def weight_names(config: ModelConfig) -> dict[str, list[str]]:
    """Map each parameter name to the names of its tensors in a Hugging Face checkpoint, in fused order."""
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tie_embeddings:
        names["head.weight"] = ["lm_head.weight"]
    shape = Shape.of(config)
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        same = {**_SAME_IN_LAYER, **(_QK_NORMS if config.qk_norm else {})}
        names.update({ours + mine: [theirs + other] for mine, other in same.items()})
        names[ours + "attention.qkv.weight"] = [theirs + f"self_attn.{part}_proj.weight" for part in "qkv"]
        if index < shape.dense_layers:
            names[ours + "feed_forward.gate_up_groups.weight"] = [
                f"{theirs}mlp.{part}_proj.weight" for part in ("gate", "up")
            ]
            names[ours + "feed_forward.down.weight"] = [theirs + "mlp.down_proj.weight"]
        else:
            names.update(_mixture_names(config, shape, ours + "feed_forward.", theirs))
    return names


def _mixture_names(config: ModelConfig, shape: Shape, ours: str, theirs: str) -> dict[str, list[str]]:
    place, (gate, up, down) = _MIXTRAL if mixture_architecture(config) == MIXTRAL else _OTHER_MIXTURES
    experts = [f"{theirs}{place}experts.{number}." for number in range(shape.experts)]
    names = {
        ours + "router.weight": [f"{theirs}{place}gate.weight"],
        ours + "experts.gate_up": [f"{expert}{part}.weight" for expert in experts for part in (gate, up)],
        ours + "experts.down": [f"{expert}{down}.weight" for expert in experts],
    }
    if shape.shared_ffn_dim:
        shared = f"{theirs}{place}shared_experts."
        names[ours + "shared.gate_up.weight"] = [f"{shared}{part}.weight" for part in (gate, up)]
        names[ours + "shared.down.weight"] = [f"{shared}{down}.weight"]
    if selects_with_bias(config):
        names[ours + "selection_bias"] = [f"{theirs}{place}gate.{SELECTION_BIAS}"]
    return names


def split_weight(name: str, tensor: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """Split a parameter into the tensors of a Hugging Face checkpoint, in the order of `weight_names`."""
    if name.endswith("gate_up.weight"):
        return list(tensor.chunk(2))
    if name.endswith("experts.gate_up"):
        return [part for expert in tensor for part in expert.chunk(2)]
    if name.endswith("experts.down"):
        return list(tensor)
    if name.endswith("gate_up_groups.weight"):
        grouped = torch.unflatten(tensor, 0, (shape.ffn_groups, 2, -1))
        return [part.flatten(0, 1) for part in grouped.unbind(1)]
    if name.endswith("qkv.weight"):
        grouped = torch.unflatten(tensor, 0, (shape.kv_heads, shape.queries_per_group + 2, shape.head_dim))
        parts = torch.split(grouped, [shape.queries_per_group, 1, 1], dim=1)
        return [part.flatten(0, 2) for part in parts]
    return [tensor]


def fuse_weights(name: str, tensors: list[torch.Tensor], shape: Shape) -> torch.Tensor:
    """Fuse the tensors of a Hugging Face checkpoint into one parameter; the inverse of `split_weight`."""
    if name.endswith("gate_up.weight"):
        return torch.cat(tensors)
    if name.endswith("experts.gate_up"):
        return torch.stack([torch.cat(tensors[i : i + 2]) for i in range(0, len(tensors), 2)])
    if name.endswith("experts.down"):
        return torch.stack(tensors)
    if name.endswith("gate_up_groups.weight"):
        return torch.stack([torch.unflatten(t, 0, (shape.ffn_groups, -1)) for t in tensors], dim=1).flatten(0, 2)
    if name.endswith("qkv.weight"):
        parts = [torch.unflatten(tensor, 0, (shape.kv_heads, -1, shape.head_dim)) for tensor in tensors]
        return torch.cat(parts, dim=1).flatten(0, 2)
    return tensors[0]


def to_huggingface_tensors(
    config: ModelConfig, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of the Hugging Face checkpoint for a state dict; views where possible."""
    shape = Shape.of(config)
    for name, theirs in weight_names(config).items():
        yield from zip(theirs, split_weight(name, state[name], shape), strict=True)

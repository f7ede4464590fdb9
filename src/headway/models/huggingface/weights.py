"""Names and layouts of the weights: fused in Headway, one tensor per projection in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from headway.config import ModelConfig
from headway.models.facts import norm_parts, parameter_shapes
from headway.models.huggingface import mixtures
from headway.models.huggingface.families import FAMILIES, GLM, GLM4, NEMOTRON_H, architecture_of
from headway.models.layers.moe import selects_with_bias
from headway.models.shape import Shape

#: Headway's name in a layer -> Hugging Face's, of tensors that are identical.
_SAME_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention_norm.bias": "input_layernorm.bias",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention_post_norm.weight": "post_self_attn_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward_norm.bias": "post_attention_layernorm.bias",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.up.bias": "mlp.up_proj.bias",
    "feed_forward.down.weight": "mlp.down_proj.weight",
    "feed_forward.down.bias": "mlp.down_proj.bias",
    "feed_forward_post_norm.weight": "post_mlp_layernorm.weight",
}
#: The same for the layers of Nemotron-H, each of which has one norm and one mixer.
_SAME_IN_HYBRID = {
    **{f"{part}_norm.weight": "norm.weight" for part in ("mamba", "attention", "feed_forward")},
    "attention.output.weight": "mixer.o_proj.weight",
    "feed_forward.up.weight": "mixer.up_proj.weight",
    "feed_forward.down.weight": "mixer.down_proj.weight",
    "mamba.input.weight": "mixer.in_proj.weight",
    "mamba.conv_weight": "mixer.conv1d.weight",
    "mamba.conv_bias": "mixer.conv1d.bias",
    "mamba.step_bias": "mixer.dt_bias",
    "mamba.log_decay": "mixer.A_log",
    "mamba.skip": "mixer.D",
    "mamba.norm_weight": "mixer.norm.weight",
    "mamba.output.weight": "mixer.out_proj.weight",
}
#: Families that fuse gate and up projection.
_FUSED = (GLM, GLM4)

#: Prefix of a layer's experts, and the names of the gate, up and down projections of an expert.
_MIXTRAL = ("block_sparse_moe.", ("w1", "w3", "w2"))
_OTHER_MIXTURES = ("mlp.", ("gate_proj", "up_proj", "down_proj"))
#: Name ending of a router's bias. It stays in fp32: bf16 would round its small steps away.
SELECTION_BIAS = "e_score_correction_bias"


def weight_names(config: ModelConfig) -> dict[str, list[str]]:
    """Map each parameter name to the names of its tensors in a Hugging Face checkpoint, in fused order."""
    architecture = architecture_of(config)
    shape = Shape.of(config)
    hybrid = architecture == NEMOTRON_H
    root = _root(architecture)
    same, attention = (_SAME_IN_HYBRID, "mixer.") if hybrid else (_SAME_IN_LAYER, "self_attn.")
    if architecture in FAMILIES:
        same = {**same, **FAMILIES[architecture].weights}
    gate_up = ["gate_up_proj"] if architecture in _FUSED else ["gate_proj", "up_proj"]
    embedding, norm = ("embeddings", "norm_f") if hybrid else ("embed_tokens", "norm")
    names = {"embedding.weight": [f"{root}{embedding}.weight"]}
    names.update({f"norm.{kind}": [f"{root}{norm}.{kind}"] for kind in norm_parts(config)})
    if not config.tie_embeddings:
        names["head.weight"] = ["lm_head.weight"]
    for ours in parameter_shapes(config):
        if not ours.startswith("layers."):
            continue
        _, index, part = ours.split(".", 2)
        theirs = f"{root}layers.{index}."
        kind = part.rsplit(".", 1)[-1]
        if part.startswith("attention.qkv."):
            names[ours] = [f"{theirs}{attention}{letter}_proj.{kind}" for letter in "qkv"]
        elif part.startswith("feed_forward.gate_up_groups."):
            names[ours] = [f"{theirs}mlp.{name}.{kind}" for name in gate_up]
        elif part == "feed_forward.router.weight":
            names.update(_mixture_names(config, shape, f"layers.{index}.feed_forward.", theirs))
        elif part in same:
            names[ours] = [theirs + same[part]]
    return names


def _root(architecture: str) -> str:
    return "backbone." if architecture == NEMOTRON_H else "model."


def layer_prefix(config: ModelConfig, index: int) -> str:
    """Return how the names of a layer's tensors begin in a Hugging Face checkpoint."""
    return f"{_root(architecture_of(config))}layers.{index}."


def is_left_out(config: ModelConfig, name: str) -> bool:
    """Return whether transformers leaves a tensor of a Hugging Face checkpoint out, as the decoder does.

    These are rotary frequencies of old checkpoints, and layers that predict further tokens (GLM-4.5, Nemotron 3).
    """
    architecture = architecture_of(config)
    if architecture == mixtures.GLM and name.startswith("model.layers."):
        index = name.split(".")[2]
        return index.isdigit() and int(index) >= (config.layers or 0)
    return name.endswith("rotary_emb.inv_freq") or (architecture == NEMOTRON_H and name.startswith("mtp."))


def _mixture_names(config: ModelConfig, shape: Shape, ours: str, theirs: str) -> dict[str, list[str]]:
    place, (gate, up, down) = _MIXTRAL if architecture_of(config) == mixtures.MIXTRAL else _OTHER_MIXTURES
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


def split_weight(name: str, tensor: torch.Tensor, config: ModelConfig) -> list[torch.Tensor]:
    """Split a parameter into the tensors of a Hugging Face checkpoint, in the order of `weight_names`."""
    shape = Shape.of(config)
    fused = architecture_of(config) in _FUSED
    if name.endswith("shared.gate_up.weight"):
        return list(tensor.chunk(2))
    if name.endswith("experts.gate_up"):
        return [part for expert in tensor for part in expert.chunk(2)]
    if name.endswith("experts.down"):
        return list(tensor)
    if ".gate_up_groups." in name:
        grouped = torch.unflatten(tensor, 0, (shape.ffn_groups, 2, -1))
        parts = [part.flatten(0, 1) for part in grouped.unbind(1)]
        return [torch.cat(parts)] if fused else parts
    if ".qkv." in name:
        grouped = torch.unflatten(tensor, 0, (shape.kv_heads, shape.queries_per_group + 2, shape.head_dim))
        q, k, v = (part.flatten(0, 2) for part in torch.split(grouped, [shape.queries_per_group, 1, 1], dim=1))
        return [_neighbours(q, shape), _neighbours(k, shape), v] if fused else [q, k, v]
    return [tensor]


def fuse_weights(name: str, tensors: list[torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Fuse the tensors of a Hugging Face checkpoint into one parameter; the inverse of `split_weight`."""
    shape = Shape.of(config)
    fused = architecture_of(config) in _FUSED
    if name.endswith("shared.gate_up.weight"):
        return torch.cat(tensors)
    if name.endswith("experts.gate_up"):
        return torch.stack([torch.cat(tensors[i : i + 2]) for i in range(0, len(tensors), 2)])
    if name.endswith("experts.down"):
        return torch.stack(tensors)
    if ".gate_up_groups." in name:
        halves = tensors[0].chunk(2) if fused else tensors
        return torch.stack([torch.unflatten(t, 0, (shape.ffn_groups, -1)) for t in halves], dim=1).flatten(0, 2)
    if ".qkv." in name:
        q, k, v = tensors
        rows = [_halves(q, shape), _halves(k, shape), v] if fused else [q, k, v]
        parts = [torch.unflatten(tensor, 0, (shape.kv_heads, -1, shape.head_dim)) for tensor in rows]
        return torch.cat(parts, dim=1).flatten(0, 2)
    return tensors[0]


def _neighbours(rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Reorder rows of heads so that rotary pairs are neighbours, as in GLM-4, and not half of the width apart."""
    return _reordered(rows, shape, (2, -1))


def _halves(rows: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Reorder rows of heads back; the inverse of `_neighbours`."""
    return _reordered(rows, shape, (-1, 2))


def _reordered(rows: torch.Tensor, shape: Shape, sides: tuple[int, int]) -> torch.Tensor:
    heads = torch.unflatten(rows, 0, (-1, shape.head_dim))
    turned = heads[:, : shape.rotary_dim]
    kept = heads[:, shape.rotary_dim :]
    return torch.cat((torch.unflatten(turned, 1, sides).transpose(1, 2).flatten(1, 2), kept), dim=1).flatten(0, 1)


def to_huggingface_tensors(
    config: ModelConfig, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of the Hugging Face checkpoint for a state dict; views where possible."""
    for name, theirs in weight_names(config).items():
        yield from zip(theirs, split_weight(name, state[name], config), strict=True)

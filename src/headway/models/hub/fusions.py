"""Matrices of transformers' models that hold those of several projections, by the classes of their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from headway.core.types import Fusion


def find_fusions(network: nn.Module) -> Iterator[tuple[nn.Parameter, Fusion]]:
    """Yield the known matrices that hold those of several projections, and how.

    The second matrix of an adapter, (rows, rank), has the rows of the matrix that it is added to.
    """
    for module in network.modules():
        for kind in type(module).__mro__:
            for name, rule in _RULES.get(kind.__name__, {}).items():
                layer = getattr(module, name, None)
                if layer is not None:
                    yield from _of_layer(getattr(layer, "base_layer", layer), layer, rule(module))


def _of_layer(base: Any, layer: Any, fusion: Fusion) -> Iterator[tuple[nn.Parameter, Fusion]]:
    fusion = replace(fusion, by_columns=type(base).__name__ == "Conv1D")  # its weight is (inputs, outputs)
    outputs = base.weight.shape[1 if fusion.by_columns else 0]
    if fusion.groups * sum(fusion.sizes) != outputs:
        return  # a variant of the class that is not known
    yield base.weight, fusion
    if getattr(base, "bias", None) is not None:
        yield base.bias, replace(fusion, by_columns=False)
    for adapter in dict(getattr(layer, "lora_B", {})).values():
        yield adapter.weight, replace(fusion, by_columns=False)


_Rule = Callable[[Any], Fusion]


def _equal(name: str, parts: int) -> _Rule:
    """Return the rule for a layer whose outputs are so many equal runs."""

    def rule(module: Any) -> Fusion:
        layer = getattr(module, name)
        base = getattr(layer, "base_layer", layer)
        outputs = base.weight.shape[1 if type(base).__name__ == "Conv1D" else 0]
        return Fusion((outputs // parts,) * parts)

    return rule


def _by_head(parts: int) -> _Rule:
    """Return the rule for outputs by head, with so many equal runs in each."""

    def rule(module: Any) -> Fusion:
        heads = _first_of(module, "num_heads", "num_attention_heads") or module.config.num_attention_heads
        return Fusion((_first_of(module, "head_dim", "head_size"),) * parts, heads)

    return rule


def _first_of(module: Any, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _one_after_the_other(module: Any) -> Fusion:
    """Return the rule for all queries, all keys, all values."""
    config = module.config
    heads = config.num_attention_heads
    return Fusion(tuple(count * module.head_dim for count in (heads, *[config.num_key_value_heads] * 2)))


def _dbrx(module: Any) -> Fusion:
    return Fusion((module.hidden_size, *[module.num_key_value_heads * module.head_dim] * 2))


def _bigcode(module: Any) -> Fusion:
    if module.multi_query:
        return Fusion((module.embed_dim, module.kv_dim, module.kv_dim))
    return _by_head(3)(module)


def _falcon(module: Any) -> Fusion:
    if module.new_decoder_architecture:
        queries = module.num_heads // module.num_kv_heads * module.head_dim
        return Fusion((queries, module.head_dim, module.head_dim), module.num_kv_heads)
    if module.multi_query:
        return Fusion((module.num_heads * module.head_dim, module.head_dim, module.head_dim))
    return _by_head(3)(module)


def _mamba_states(module: Any) -> Fusion:
    return Fusion((module.time_step_rank, module.ssm_state_size, module.ssm_state_size))


def _mamba2(module: Any) -> Fusion:
    """Return the rule for gate, inputs, B, C and steps."""
    inner = module.intermediate_size
    states = module.n_groups * module.ssm_state_size
    return Fusion((inner, inner, states, states, module.num_heads))


def _zamba(module: Any) -> Fusion:
    return Fusion((1, 1), module.intermediate_size)


def _delta_net(module: Any) -> Fusion:
    values = module.num_v_heads // module.num_k_heads * module.head_v_dim
    return Fusion((module.head_k_dim, module.head_k_dim, values, values), module.num_k_heads)


def _delta_net_steps(module: Any) -> Fusion:
    per_head = module.num_v_heads // module.num_k_heads
    return Fusion((per_head, per_head), module.num_k_heads)


def _delta_net_qkv(module: Any) -> Fusion:
    return Fusion((module.key_dim, module.key_dim, module.value_dim))


_GATED = {"gate_up_proj": _equal("gate_up_proj", 2)}
_MAMBA = {"in_proj": _equal("in_proj", 2), "x_proj": _mamba_states}
_MAMBA2 = {"in_proj": _mamba2}
_BY_HEAD = {"query_key_value": _by_head(3)}
_GRANITE = {"input_linear": _equal("input_linear", 2)}
_DELTA_NET = {"in_proj_qkv": _delta_net_qkv}
_WITH_GATE = {"q_proj": _by_head(2)}  # queries, and the gates of their outputs

#: Class of a module -> the name of a layer in it -> how its outputs hold several projections.
_RULES: Mapping[str, Mapping[str, _Rule]] = {
    "Phi3Attention": {"qkv_proj": _one_after_the_other},
    "Phi3MLP": _GATED,
    "Phi4MultimodalAttention": {"qkv_proj": _one_after_the_other},
    "Phi4MultimodalMLP": _GATED,
    "GlmMLP": _GATED,
    "Glm4MLP": _GATED,
    "Zamba2MLP": _GATED,
    "GraniteMoeSharedMLP": _GRANITE,
    "GraniteMoeHybridMLP": _GRANITE,
    "GraniteMoeSWAMLP": _GRANITE,
    "GPT2Attention": {"c_attn": _equal("c_attn", 3)},
    "GPTBigCodeAttention": {"c_attn": _bigcode},
    "GPTNeoXAttention": _BY_HEAD,
    "BloomAttention": _BY_HEAD,
    "PersimmonAttention": _BY_HEAD,
    "FalconAttention": {"query_key_value": _falcon},
    "MptAttention": {"Wqkv": _equal("Wqkv", 3)},
    "DbrxAttention": {"Wqkv": _dbrx},
    "MiniMaxLightningAttention": {"qkv_proj": _by_head(3)},
    "Lfm2ShortConv": {"in_proj": _equal("in_proj", 3)},
    "Lfm2MoeShortConv": {"in_proj": _equal("in_proj", 3)},
    "MambaMixer": _MAMBA,
    "FalconMambaMixer": _MAMBA,
    "JambaMambaMixer": _MAMBA,
    "ZambaMambaMixer": {"in_proj": _zamba},
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "Qwen3NextAttention": _WITH_GATE,
    "Qwen3_5Attention": _WITH_GATE,
    "Qwen3_5MoeAttention": _WITH_GATE,
    "Qwen3NextGatedDeltaNet": {"in_proj_qkvz": _delta_net, "in_proj_ba": _delta_net_steps},
    "Qwen3_5GatedDeltaNet": _DELTA_NET,
    "Qwen3_5MoeGatedDeltaNet": _DELTA_NET,
}

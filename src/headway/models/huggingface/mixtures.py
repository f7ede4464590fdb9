"""The transformers architecture for a decoder with experts, and its keys in `config.json`.

Mixtral, Qwen 3 MoE and GLM-4 MoE have this decoder's attention and weigh the chosen experts as it does. Mixtral and
Qwen have softmax scores and no bias. GLM has sigmoid scores, a bias that affects only the choice, and shared experts.
DeepSeek-V3 has these too, but with different attention.
"""

from __future__ import annotations

from typing import Any

from headway.config import ModelConfig
from headway.core.errors import ConfigError
from headway.models.huggingface.rope import partial_rotary
from headway.models.layers.moe import selects_with_bias
from headway.models.shape import Shape

MIXTRAL = "MixtralForCausalLM"
QWEN = "Qwen3MoeForCausalLM"
GLM = "Glm4MoeForCausalLM"
MIXTURES = (MIXTRAL, QWEN, GLM)
MODEL_TYPES = {MIXTRAL: "mixtral", QWEN: "qwen3_moe", GLM: "glm4_moe"}

#: Defaults of the config classes for missing keys, where they differ from this decoder's defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    MIXTRAL: {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    QWEN: {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    GLM: {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
    },
}
#: Key -> the only value that this decoder supports.
REQUIRED = {
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
    "router_jitter_noise": 0.0,
}


#: Key -> its value in all supported architectures with experts, and in words.
_DENSE_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("attention_pattern", None, "null"),
    ("attention_scale", None, "null"),
    ("attention_softcap", None, "null"),
    ("embedding_scale", 1.0, "1"),
    ("residual_scale", 1.0, "1"),
    ("logit_divisor", 1.0, "1"),
    ("logit_softcap", None, "null"),
)


def mixture_architecture(config: ModelConfig) -> str:
    """Return the architecture that computes a decoder with experts.

    Raises:
        ConfigError: no architecture does.
    """
    architecture = GLM if config.router_score == "sigmoid" else QWEN if config.qk_norm else MIXTRAL
    for key, wrong, why, fix in _obstacles(config, architecture):
        if wrong:
            raise ConfigError(
                f"this mixture of experts cannot be exported: {why}", where=f"model.{key}", fix=f"train with {fix}"
            )
    return architecture


def _obstacles(config: ModelConfig, architecture: str) -> list[tuple[str, bool, str, str]]:
    """List possible obstacles to the export: key, whether it applies, why, and the alternative."""
    softmax = architecture != GLM
    narrow = bool(config.sliding_window)
    biases = (config.qkv_bias, config.output_bias)
    own_biases = {MIXTRAL: (False, False), QWEN: (True, True), GLM: (True, False)}[architecture]
    return [
        (
            "balance_bias_rate",
            softmax and selects_with_bias(config),
            "no supported architecture with softmax scores has a bias for the choice of experts",
            "balance_bias_rate: 0 and balance_loss, or router_score: sigmoid",
        ),
        (
            "shared_experts",
            softmax and config.shared_experts > 0,
            "no supported architecture with softmax scores has shared experts",
            "router_score: sigmoid, or without shared experts",
        ),
        (
            "shared_experts",
            not softmax and config.shared_experts == 0,
            "the supported architecture with sigmoid scores has shared experts",
            "shared_experts: 1, or router_score: softmax",
        ),
        (
            "experts",
            not softmax and config.experts == 1,
            "the supported architecture with sigmoid scores needs at least two experts",
            "experts: 2, or router_score: softmax",
        ),
        (
            "dense_layers",
            architecture == MIXTRAL and config.dense_layers > 0,
            "Mixtral has experts in every layer",
            "dense_layers: 0, or qk_norm: true (Qwen 3 MoE)",
        ),
        (
            "sliding_window",
            architecture != MIXTRAL and narrow,
            "of the supported architectures with experts only Mixtral has a sliding window",
            "sliding_window: null",
        ),
        (
            "qkv_bias, model.output_bias",
            biases not in ((False, False), own_biases),
            f"{architecture.removesuffix('ForCausalLM')} has no such biases",
            "qkv_bias: false and output_bias: false",
        ),
        (
            "rotary_fraction",
            config.rotary_fraction < 1 and (softmax or config.rotary_fraction == 0),
            "of the supported architectures with experts only GLM-4 turns a part of a head",
            "rotary_fraction: 1",
        ),
        (
            "router_scale",
            softmax and config.router_scale != 1,
            "no supported architecture with softmax scores scales the output of experts",
            "router_scale: 1",
        ),
        (
            "normalize_router_weights",
            architecture == MIXTRAL and not config.normalize_router_weights,
            "Mixtral divides the weights of experts by their sum",
            "normalize_router_weights: true, or qk_norm: true (Qwen 3 MoE)",
        ),
        (
            "norm",
            config.norm != "rmsnorm" or config.post_norms or not config.pre_norms or config.qk_norm_over != "head",
            "no supported architecture with experts has these norms",
            "norm: rmsnorm, post_norms: false and qk_norm_over: head",
        ),
        *(
            (key, getattr(config, key) != default, "no supported architecture with experts has this", f"{key}: {words}")
            for key, default, words in _DENSE_ONLY
        ),
    ]


def mixture_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of `config.json` for the experts and their architecture."""
    shape = Shape.of(config)
    architecture = mixture_architecture(config)
    common = {"num_experts_per_tok": shape.experts_per_token, "output_router_logits": False}
    if architecture == MIXTRAL:
        return {
            **common,
            "intermediate_size": shape.expert_ffn_dim,
            "num_local_experts": shape.experts,
            "sliding_window": config.sliding_window,
        }
    common |= {
        "moe_intermediate_size": shape.expert_ffn_dim,
        "norm_topk_prob": config.normalize_router_weights,
        "attention_bias": config.qkv_bias,
    }
    if architecture == QWEN:
        return {
            **common,
            "num_experts": shape.experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.dense_layers)),
            "use_sliding_window": False,
            "sliding_window": None,
        }
    return {
        **common,
        "n_routed_experts": shape.experts,
        "n_shared_experts": config.shared_experts,
        "first_k_dense_replace": shape.dense_layers,
        "routed_scaling_factor": config.router_scale,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": config.rotary_fraction,
        "num_nextn_predict_layers": 0,
    }


def from_mixture_keys(architecture: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of `ModelConfig` that a checkpoint with experts determines.

    Raises:
        ConfigError: dense layers are not at the start.
    """
    expert_ffn_dim = values["intermediate_size"] if architecture == MIXTRAL else values["moe_intermediate_size"]
    keys = {"experts_per_token": values["num_experts_per_tok"], "expert_ffn_dim": expert_ffn_dim}
    if architecture == MIXTRAL:
        keys["sliding_window"] = values.get("sliding_window")
        return {**keys, "experts": values["num_local_experts"], "router_score": "softmax"}
    bias = bool(values.get("attention_bias"))
    keys |= {"qkv_bias": bias, "normalize_router_weights": bool(values.get("norm_topk_prob", True))}
    if architecture == QWEN:
        dense = sorted(values.get("mlp_only_layers") or [])
        if dense != list(range(len(dense))):
            raise ConfigError(
                f"the layers without experts are {dense}; in the native decoder they must be the first ones",
                where=f"{where}, mlp_only_layers",
                fix="use another checkpoint",
            )
        experts = values.get("num_local_experts") or values["num_experts"]
        keys |= {"qk_norm": True, "output_bias": bias}
        return {**keys, "experts": experts, "dense_layers": len(dense), "router_score": "softmax"}
    return {
        **keys,
        **partial_rotary(values),
        "qk_norm": bool(values.get("use_qk_norm")),
        "router_scale": values.get("routed_scaling_factor", 1.0),
        "experts": values["n_routed_experts"],
        "shared_experts": values["n_shared_experts"],
        "dense_layers": values["first_k_dense_replace"],
        "router_score": "sigmoid",
    }

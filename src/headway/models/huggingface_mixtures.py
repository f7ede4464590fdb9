"""Which architecture of transformers computes a decoder with experts, and its keys in `config.json`.

Mixtral, Qwen 3 MoE and GLM-4 MoE have this decoder's attention and weigh the chosen experts as it does. The first two
have softmax scores and no bias; the last has sigmoid scores, a bias that counts in the choice alone, and shared experts
(as DeepSeek-V3 has, whose attention is another).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.core.errors import ConfigError
from headway.models.moe import selects_with_bias
from headway.models.shape import Shape

if TYPE_CHECKING:
    from headway.config import ModelConfig

MIXTRAL, QWEN, GLM = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM"
MIXTURES = (MIXTRAL, QWEN, GLM)
MODEL_TYPES = {MIXTRAL: "mixtral", QWEN: "qwen3_moe", GLM: "glm4_moe"}

#: What the config classes assume when a key is missing, where that differs from what this decoder assumes.
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
#: Key -> the only value with which this decoder computes the same.
REQUIRED = {
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "router_jitter_noise": 0.0,
}


def mixture_architecture(config: ModelConfig) -> str:
    """The architecture that computes a decoder with experts.

    Raises:
        ConfigError: there is none.
    """
    architecture = GLM if config.router_score == "sigmoid" else QWEN if config.qk_norm else MIXTRAL
    for key, wrong, why, fix in _obstacles(config, architecture):
        if wrong:
            raise ConfigError(
                f"this mixture of experts cannot be exported: {why}", where=f"model.{key}", fix=f"train with {fix}"
            )
    return architecture


def _obstacles(config: ModelConfig, architecture: str) -> list[tuple[str, bool, str, str]]:
    """Key, whether it is in the way, why, and what would not be."""
    softmax, narrow = architecture != GLM, bool(config.sliding_window)
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
            "the supported architecture with sigmoid scores ranks two experts at least",
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
    ]


def mixture_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` that belong to the experts and to their architecture."""
    shape, architecture = Shape.of(config), mixture_architecture(config)
    common = {"num_experts_per_tok": shape.experts_per_token, "output_router_logits": False}
    if architecture == MIXTRAL:
        return {
            **common,
            "intermediate_size": shape.expert_ffn_dim,
            "num_local_experts": shape.experts,
            "sliding_window": config.sliding_window,
        }
    common |= {"moe_intermediate_size": shape.expert_ffn_dim, "norm_topk_prob": True, "attention_bias": False}
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
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": 1.0},
        "num_nextn_predict_layers": 0,
    }


def from_mixture_keys(architecture: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys of `ModelConfig` that a checkpoint with experts says.

    Raises:
        ConfigError: dense layers are elsewhere than at the start.
    """
    expert_ffn_dim = values["intermediate_size"] if architecture == MIXTRAL else values["moe_intermediate_size"]
    keys = {"experts_per_token": values["num_experts_per_tok"], "expert_ffn_dim": expert_ffn_dim}
    if architecture == MIXTRAL:
        return {**keys, "experts": values["num_local_experts"], "router_score": "softmax"}
    if architecture == QWEN:
        dense = sorted(values.get("mlp_only_layers") or [])
        if dense != list(range(len(dense))):
            raise ConfigError(
                f"layers without experts are {dense}; in the native decoder they are the first ones",
                where=f"{where}, mlp_only_layers",
                fix="use another checkpoint",
            )
        experts = values.get("num_local_experts") or values["num_experts"]
        return {**keys, "experts": experts, "dense_layers": len(dense), "router_score": "softmax"}
    return {
        **keys,
        "experts": values["n_routed_experts"],
        "shared_experts": values["n_shared_experts"],
        "dense_layers": values["first_k_dense_replace"],
        "router_score": "sigmoid",
    }

"""Families of language models as tiny random configs of transformers, with a vocabulary for the tests' tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headway import Callback

VOCAB = 320
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4}
_ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

#: Name -> (class of the config, its keys beyond the common sizes; None drops one of these).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-3": ("LlamaConfig", {"rope_parameters": _ROPE3}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma-2": (
        "Gemma2Config",
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "gemma-3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
    "phi-3": ("Phi3Config", {}),
    "gpt-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64, **_NO_DROPOUT}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "olmo-2": ("Olmo2Config", {}),
    "smollm-3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "nemotron": ("NemotronConfig", {}),
    "nemotron-h": (
        "NemotronHConfig",
        {**_MAMBA, "head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "chunk_size": 16},
    ),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}),
    "qwen2-moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 8}),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "head_dim": 8,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "falcon-h1": ("FalconH1Config", {**_BAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "llama-4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 16,
        },
    ),
    "lfm-2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 64}),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mamba-2": (
        "Mamba2Config",
        {
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "expand": 2,
            "chunk_size": 16,
        },
    ),
    "bamba": ("BambaConfig", {**_BAMBA, "attn_layer_indices": [1]}),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    ),
    "glm-4-moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.0,
        },
    ),
}


def family_config(name: str, **changes: Any) -> Any:
    """The config of transformers of a tiny model of a family."""
    import transformers

    kind, keys = FAMILIES[name]
    return getattr(transformers, kind)(**{**_SIZES, **keys, **changes})


def write_family(name: str, folder: Path, **changes: Any) -> Path:
    """Write a tiny random model of a family."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family_config(name, **changes))
    model.save_pretrained(folder)
    return folder


class CrashAt(Callback):
    """Ends a training in the middle, at its so many-th step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, *arguments: Any) -> None:
        self.step -= 1
        if not self.step:
            raise RuntimeError("as if killed")

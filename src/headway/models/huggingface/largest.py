"""Bounds of what a `config.json` may ask for, whatever code computes the model."""

from __future__ import annotations

from typing import Any

from headway.core.errors import ConfigError

_LAYERS = 10_000
_WIDTH = 2**20
_INNER_WIDTH = 2**22
_HEADS = 2**16
_POSITIONS = 2**26
#: Key -> the largest accepted size, far above that of any existing model. A config with a larger size is damaged or
#: hostile, and building that many modules would exhaust time and memory.
LARGEST = {
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers"), _LAYERS
    ),
    **dict.fromkeys(("decoder_layers", "first_k_dense_replace", "num_nextn_predict_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "mamba_d_ssm", "rnn_hidden_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), _INNER_WIDTH),
    **dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size", "block_ff_dim", "intermediate_size_mlp"), _INNER_WIDTH),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads", "linear_num_key_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 2**16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"), 2**16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), _POSITIONS),
    "vocab_size": 2**24,
    "sliding_window": 2**31,
    "n_shared_experts": 2**10,
}


def check_sizes(values: dict[str, Any], where: str) -> None:
    """Check the sizes in a `config.json` and the configs inside it before anything is built.

    Raises:
        ConfigError: one is larger than that of any model.
    """
    for key, value in values.items():
        if isinstance(value, dict):
            check_sizes(value, where)
        if isinstance(value, list | str) and len(value) > _LAYERS:  # such as a kind for each layer
            raise ConfigError(
                f"{key} has {len(value):,} entries, more than any model has layers (up to {_LAYERS:,} are read)",
                where=where,
                fix="give a sound checkpoint",
            )
        largest = LARGEST.get(key)
        if largest is not None and isinstance(value, int | float) and not value <= largest:  # NaN too
            raise ConfigError(
                f"{key} is {value!r}, more than any model has (up to {largest:,} is read)",
                where=where,
                fix="give a sound checkpoint",
            )

"""Named shapes of the native decoder, from 1 M to 70 B parameters (with a 32k vocabulary; see `headway models`)."""

from __future__ import annotations

from typing import Any


def _shape(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, **more: Any) -> dict[str, Any]:
    return {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "ffn_dim": ffn_dim, **more}


_TIED: dict[str, Any] = {"tie_embeddings": True}
_SIXTEEN: dict[str, Any] = {
    "experts": 16,
    "experts_per_token": 2,
    "shared_experts": 1,
    "dense_layers": 1,
    "router_score": "sigmoid",
}
_LONG: dict[str, Any] = {"max_sequence_length": 8192, "rope_theta": 500_000.0}

#: Shape name -> the `model.*` keys it stands for. The 1B and larger ones are those of the Llama 3 family
#: (Dubey et al. 2024, table 3; 7b and 13b are Llama 2's, Touvron et al. 2023, table 1). 117m, another name of 125m, is
#: GPT's: 12 layers, 12 heads, width 768 (Radford et al. 2018, section 4.1), 116 M parameters with its vocabulary of
#: 40 k. Of those with experts, 8x7b is Mixtral's (Jiang et al. 2024, table 1) and 30b-a3b Qwen 3's.
SHAPES: dict[str, dict[str, Any]] = {
    "1m": _shape(96, 4, 4, 2, 256, **_TIED),
    "4m": _shape(192, 6, 6, 3, 512, **_TIED),
    "10m": _shape(256, 8, 8, 4, 704, **_TIED),
    "30m": _shape(384, 10, 6, 3, 1024, **_TIED),
    "60m": _shape(512, 12, 8, 4, 1408, **_TIED),
    "117m": _shape(768, 12, 12, 12, 2048, **_TIED),
    "125m": _shape(768, 12, 12, 12, 2048, **_TIED),
    "350m": _shape(1024, 24, 16, 8, 2816, **_TIED),
    "1b": _shape(2048, 16, 32, 8, 8192, **_TIED, **_LONG),
    "3b": _shape(3072, 28, 24, 8, 8192, **_TIED, **_LONG),
    "7b": _shape(4096, 32, 32, 32, 11008, max_sequence_length=4096),
    "8b": _shape(4096, 32, 32, 8, 14336, **_LONG),
    "13b": _shape(5120, 40, 40, 40, 13824, max_sequence_length=4096),
    "30b": _shape(6656, 60, 52, 52, 17920, max_sequence_length=4096),
    "70b": _shape(8192, 80, 64, 8, 28672, **_LONG),
    "16m-moe": _shape(192, 6, 6, 3, 512, **_TIED, **_SIXTEEN, expert_ffn_dim=256),
    "250m-moe": _shape(512, 12, 8, 4, 1408, **_TIED, **_SIXTEEN, expert_ffn_dim=704),
    "8x7b": _shape(4096, 32, 32, 8, 14336, experts=8, max_sequence_length=32_768, rope_theta=1e6),
    "30b-a3b": _shape(
        2048,
        48,
        32,
        4,
        6144,
        head_dim=128,
        experts=128,
        experts_per_token=8,
        expert_ffn_dim=768,
        qk_norm=True,
        norm_eps=1e-6,
        max_sequence_length=40_960,
        rope_theta=1e6,
    ),
}

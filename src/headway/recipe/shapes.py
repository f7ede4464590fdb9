"""Shapes."""

from __future__ import annotations

from typing import Any


def decoder_of(dim: int, layers: int) -> dict[str, Any]:
    """Return shape."""
    head_dim = 32 if dim < 256 else 64
    heads = dim // head_dim
    return {
        "dim": dim,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads // 2 if heads % 2 == 0 else heads,
        "ffn_dim": -(-dim * 8 // 3 // 64) * 64,
        "tie_embeddings": True,
    }

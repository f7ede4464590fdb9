"""The chunks in which the loss is computed; `headway plan` counts their memory without loading torch."""

from __future__ import annotations

#: Bytes of fp32 logits at a time on a CPU, so that they stay in its last-level cache.
_CHUNK_BYTES_CPU = 16 * 2**20
#: On accelerators few chunks are better: each one adds a part of the projection's gradient, in fp32, to the sum.
_CHUNK_BYTES_ELSEWHERE = 2**30
_MIN_CHUNK_ROWS = 256
#: Rows of the projection's gradient that a CPU computes at a time in 16 bits, and adds at a time in fp32.
PRODUCT_ROWS = 8192
ADDED_ROWS = 2048
#: Most rows of a tile in an accelerator's products; a partial tile takes as long as a full one.
_TILE_ROWS = 256


def default_chunk_rows(device: str, vocab_size: int, in_16_bits: bool = False) -> int:
    """Choose the number of rows whose logits exist at a time.

    Args:
        device: Device type, "cpu", "cuda", ...; on accelerators the number is a multiple of the tile.
        vocab_size: Columns of the logits.
        in_16_bits: No logits exist in fp32.
    """
    if device == "cpu":
        return max(_MIN_CHUNK_ROWS, _CHUNK_BYTES_CPU // (4 * vocab_size)) * (2 if in_16_bits else 1)
    rows = _CHUNK_BYTES_ELSEWHERE // (4 * vocab_size)
    return max(_MIN_CHUNK_ROWS, rows - rows % _TILE_ROWS)

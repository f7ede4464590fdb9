"""Keys and values of the positions seen so far, so that generation computes each position once."""

from __future__ import annotations

import torch

from headway.models.shape import Shape


class KVCache:
    """A fixed amount of memory for `capacity` positions of every layer.

    The decoder writes into it and moves `length` on; one cache belongs to one sequence (batch) at a time.

    Args:
        shape: Shape of the decoder.
        rows: Sequences in the batch.
        capacity: Positions that fit, prompt included.
        dtype: That of the decoder's keys and values.
        device: Where the decoder computes.
    """

    def __init__(self, shape: Shape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        size = (shape.layers, rows, capacity, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def extend(self, layer: int, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values of the next positions.

        Returns:
            Keys and values of all positions so far, (rows, length + T, kv_heads, head_dim), as views.
        """
        end = self.length + k_BTKH.shape[1]
        self.keys[layer, :, self.length : end] = k_BTKH
        self.values[layer, :, self.length : end] = v_BTKH
        return self.keys[layer, :, :end], self.values[layer, :, :end]

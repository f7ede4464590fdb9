"""Keys, values and states of earlier positions, so that generation computes each position once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.config import ModelConfig
from headway.models.shape import Shape


class MambaState(NamedTuple):
    """What a layer keeps of the positions before, for generation."""

    inputs: torch.Tensor
    """The last inputs of the convolution, (B, W - 1, E)."""
    sums: torch.Tensor
    """The state of every head, (B, G, N, R * P), fp32."""

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, device: torch.device) -> MambaState:
        """Create the state before the first position."""
        sizes = config.mamba
        assert sizes is not None
        per_group = sizes.width // sizes.groups
        return cls(
            torch.zeros(rows, sizes.conv_width - 1, sizes.channels, device=device),
            torch.zeros(rows, sizes.groups, sizes.state_dim, per_group, device=device),
        )


class KVCache:
    """A preallocated cache of `capacity` positions for every layer with attention, and the states of Mamba-2 layers.

    The decoder writes into it and advances `length`; one cache serves one batch of sequences at a time.

    Args:
        shape: Shape of the decoder.
        rows: Sequences in the batch.
        capacity: Maximum number of positions, prompt included.
        dtype: Dtype of the decoder's keys and values.
        device: Device of the decoder.
    """

    def __init__(self, shape: Shape, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._places = {layer: place for place, layer in enumerate(shape.attention_layers)}
        size = (len(self._places), rows, capacity, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.states: dict[int, MambaState] = {}
        """State of each Mamba-2 layer."""

    def extend(self, layer: int, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values of the next positions.

        Returns:
            Keys and values of all positions so far, (rows, length + T, kv_heads, head_dim), as views.
        """
        end = self.length + k_BTKH.shape[1]
        place = self._places[layer]
        self.keys[place, :, self.length : end] = k_BTKH
        self.values[place, :, self.length : end] = v_BTKH
        return self.keys[place, :, :end], self.values[place, :, :end]

"""Keys, values and states of earlier positions, so that generation computes each position once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headway.config import ModelConfig
from headway.models.layers.attention import Positions, attend, attention_mask
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

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        positions: Positions,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store a layer's keys and values, and compute attention to all so far (`attention.attend`)."""
        k, v = self.extend(layer, k, v)
        return attend(q, k, v, positions, softcap)

    def advance(self, count: int) -> None:
        """Count positions that all layers have stored."""
        self.length += count

    def positions(self, cos: torch.Tensor, sin: torch.Tensor, length: int, window: int | None) -> Positions:
        """Build the positions of the next `length` tokens from the rotary tables."""
        mask_TS, is_causal = attention_mask(self.length, length, window, cos.device)
        end = self.length + length
        return Positions(cos[self.length : end], sin[self.length : end], mask_TS, is_causal)

    def copy(self) -> KVCache:
        """Copy the positions so far into a cache of its own."""
        other = object.__new__(KVCache)
        vars(other).update(vars(self))
        other.keys = self.keys.clone()
        other.values = self.values.clone()
        other.states = dict(self.states)
        return other


class RowCaches:
    """The caches of sequences of different lengths, each of one row, for one more token of each (Yu et al. 2022).

    Attention is computed row by row, with the calls that each sequence alone would make. Rows of the batch beyond the
    last cache are padding; their attention is 0.
    """

    def __init__(self, rows: Sequence[KVCache]) -> None:
        self.rows = rows

    @property
    def length(self) -> int:
        """Positions of the longest sequence."""
        return max(row.length for row in self.rows)

    @property
    def capacity(self) -> int:
        """The length that the longest sequence would have when the first cache is full."""
        return self.length + min(row.capacity - row.length for row in self.rows)

    def advance(self, count: int) -> None:
        """Count positions that all layers have stored."""
        for row in self.rows:
            row.advance(count)

    def positions(self, cos: torch.Tensor, sin: torch.Tensor, length: int, window: int | None) -> Positions:
        """Build the positions of the next token of every sequence, and of padding, from the rotary tables."""
        places = [row.length for row in self.rows]
        places += [0] * (length - len(places))
        places_B1 = torch.tensor(places, device=cos.device)[:, None]
        rows = [row.positions(cos, sin, 1, window) for row in self.rows]
        return Positions(cos[places_B1], sin[places_B1], rows=rows)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        positions: Positions,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store a layer's keys and values of every sequence, and compute the attention of each."""
        assert positions.rows is not None
        y = torch.zeros_like(q)
        for index, (row, place) in enumerate(zip(self.rows, positions.rows, strict=True)):
            one = slice(index, index + 1)
            y[one] = row.attend(layer, q[one], k[one], v[one], positions=place, softcap=softcap)
        return y

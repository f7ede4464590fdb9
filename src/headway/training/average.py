"""An exponential moving average of the weights, part of the state (Polyak & Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from headway.core.types import StateBlocks
from headway.parallel.blocks import block_of

#: Names of its tensors in the state begin so.
AVERAGE = "ema."


class WeightAverage:
    """The average of this worker's part of every trainable parameter; it begins as the weights.

    Args:
        model: Under its strategy, with its weights in place.
        decay: What the average keeps in each update.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._averages = {name: block_of(p).local.clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again as the weights, where a checkpoint has no average."""
        for name, average in self._averages.items():
            average.copy_(block_of(self._parameters[name]).local)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights, after an update of these.

        The product and the sum are rounded one by one: a fused kernel would round elements by where a shard is cut.
        """
        averages = list(self._averages.values())
        weights = [block_of(p).local for p in self._parameters.values()]
        torch._foreach_mul_(averages, self._decay)
        torch._foreach_add_(averages, torch._foreach_mul(weights, 1 - self._decay))

    def blocks(self) -> StateBlocks:
        """Return this worker's blocks of the average, by name."""
        return {
            f"{AVERAGE}{name}": replace(block_of(p), local=self._averages[name]) for name, p in self._parameters.items()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the weights for their average in a block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, p in self._parameters.items():
            weight = block_of(p).local
            average = self._averages[name]
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

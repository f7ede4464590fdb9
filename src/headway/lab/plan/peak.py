"""The content of memory at points of a step, and its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Moment:
    """The content of memory at one point of a step, in bytes."""

    name: str
    weights: int = 0
    """Weights of this worker."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Tensors saved for the backward pass, including autocast's copies of weights."""
    buffers: int = 0
    """The loss and its chunk of logits, temporaries, rotary tables, batches, sums of lanes."""
    communication: int = 0
    """Gathered weights, and gradients in flight."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    def plus(self, name: str, **more: int) -> Moment:
        """Return a moment with more bytes in some parts."""
        return Moment(name, **{part: count + more.get(part, 0) for part, count in self.parts.items()})


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the worker that needs most."""

    moments: Sequence[Moment]

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak."""
        return self.peak.total

"""What is in memory at points of a step, and the largest of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Moment:
    """What is in memory at one point of a step, in bytes."""

    name: str
    weights: int = 0
    """This worker's own."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """What the backward pass needs, copies of weights that autocast made included."""
    buffers: int = 0
    """What comes and goes: the loss and its chunk of logits, temporaries, rotary tables, batches, sums of lanes."""
    communication: int = 0
    """Weights brought together, and gradients on their way."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    def plus(self, name: str, **more: int) -> Moment:
        """The same with more of some parts."""
        return Moment(name, **{part: count + more.get(part, 0) for part, count in self.parts.items()})


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of the worker that has most."""

    moments: Sequence[Moment]

    @property
    def peak(self) -> Moment:
        """When there is most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """The most there is at a time."""
        return self.peak.total

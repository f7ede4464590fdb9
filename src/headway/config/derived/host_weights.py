"""What host memory has of each weight where the device has it in bf16 (`train.weights`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from headway.config.schema import Config

Kept = Literal["fp32", "bf16"]
_BYTES: dict[Kept, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class HostTypes:
    """Types of what is updated in host memory; sums of gradients are always in fp32."""

    masters: Kept
    """Of what the update changes: fp32 masters, or the weights themselves (`bf16_stochastic`)."""
    moments: Kept
    """Of the two moments."""

    @property
    def master_bytes(self) -> int:
        """Bytes of what the update changes of each weight."""
        return _BYTES[self.masters]

    @property
    def kept_bytes(self) -> int:
        """Bytes that a checkpoint holds of each weight, moments included."""
        return self.master_bytes + 2 * _BYTES[self.moments]

    @property
    def summed_bytes(self) -> int:
        """Bytes of the sum of gradients of each weight."""
        return _BYTES["fp32"]


def host_types(config: Config) -> HostTypes:
    """Return the types of a run whose `train.weights` is not fp32."""
    if config.train.weights == "bf16_stochastic":
        return HostTypes("bf16", "bf16")
    return HostTypes("fp32", config.optimizer.moments)

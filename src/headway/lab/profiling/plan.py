"""Which steps a profile has."""

from __future__ import annotations

from dataclasses import dataclass

#: Few steps, since a trace of every operator is large.
TRACED_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """Numbers of steps of each kind."""

    warmup: int
    timed: int
    traced: int
    snapshot: bool = False

    @property
    def steps(self) -> int:
        """Number of all steps, including the one in which the run stops and saves."""
        return self.warmup + self.timed + self.traced + 1

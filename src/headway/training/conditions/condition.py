"""The interface of a condition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Reading:
    """What a condition has read."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics for `metrics.jsonl`; unknown ones are absent."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Warnings by topic; each is shown once, until the condition is good again."""


class Condition(Protocol):
    """Something in a run's environment that may go wrong."""

    def read(self) -> Reading:
        """Read the condition. It is called every so many seconds, on a separate thread."""
        ...

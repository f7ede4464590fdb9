"""What a condition is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Reading:
    """What a condition has found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """For `metrics.jsonl`; what is unknown is absent."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """What is not well, in words, by what it is about; said once, until it is well again."""


class Condition(Protocol):
    """Something around a run that may go wrong."""

    def read(self) -> Reading:
        """Look at it. Called every so many seconds, on a thread of its own."""
        ...

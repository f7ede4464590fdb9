"""Retention: which checkpoints to keep, as a pure function of the checkpoints and the rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.checkpoint.lineage import UNKNOWN, Origin, ancestors
from headway.config import Interval
from headway.core.format import format_seconds

if TYPE_CHECKING:
    from headway.config import RetentionConfig


@dataclass(frozen=True)
class Rules:
    """The retention rules (`config.RetentionConfig`)."""

    keep: int = 3
    keep_every: Interval | None = None
    keep_best: int = 0
    keep_metric: str = "evaluation/loss"
    keep_mode: str = "min"
    """`min` or `max`: whether a low or a high metric is best."""
    keep_for_seconds: int | None = None

    @classmethod
    def of(cls, config: RetentionConfig) -> Rules:
        """Convert the rules of a config."""
        age = config.keep_for.amount if config.keep_for is not None else None
        best = config.keep_best, config.keep_metric, config.keep_mode
        return cls(config.keep, config.keep_every, *best, age)


@dataclass(frozen=True)
class Candidate:
    """The facts about a checkpoint that the rules need."""

    step: int
    time: float
    """Unix seconds at which it was made."""
    metric: float | None = None
    """Value of the rules' metric at this step; None if unknown."""
    tokens: int | None = None
    """Tokens trained on; None if unknown, and then a rule in tokens keeps the checkpoint."""
    good: bool = True
    """Whether its manifest can be read."""
    origin: Origin = UNKNOWN
    """The attempt and the checkpoint that it came from."""


def kept(candidates: Iterable[Candidate], rules: Rules, now: float) -> dict[int, str]:
    """Return the steps to keep, each with the first rule that keeps it.

    The newest good checkpoint always stays. Checkpoints that are not good, or outside the lineage of the newest, do not
    count for any rule, so they displace no others. The recent ones among them stay for inspection.

    Args:
        candidates: One per step, in any order.
        rules: The rules; a checkpoint stays if any rule keeps it.
        now: Unix seconds.
    """
    ordered = sorted(candidates, key=lambda c: c.step)
    line = ancestors({c.step: c.origin for c in ordered if c.good})
    good = [c for c in ordered if c.step in line]
    reasons: dict[int, str] = {}

    def keep(chosen: Iterable[Candidate], why: str) -> None:
        for candidate in chosen:
            reasons.setdefault(candidate.step, why)

    keep(good[-1:], "the newest")
    keep(good[-rules.keep :], f"among the newest {rules.keep}")
    oldest_new = good[-rules.keep :][0].step if good else 0
    outside = (c for c in ordered if c.step not in line and c.step > oldest_new)
    keep(outside, "was passed over or cannot be read, and is new")
    if rules.keep_every is not None:
        keep(_first_of_each(good, rules.keep_every.amount, rules.keep_every.unit), f"one every {rules.keep_every}")
    if rules.keep_best:
        by = rules.keep_metric + (" (highest)" if rules.keep_mode == "max" else "")
        keep(_best(good, rules.keep_best, rules.keep_mode), f"among the best {rules.keep_best} by {by}")
    if rules.keep_for_seconds is not None:
        oldest = now - rules.keep_for_seconds
        keep((c for c in good if c.time >= oldest), f"younger than {format_seconds(rules.keep_for_seconds)}")
    return reasons


def outdated(candidates: Sequence[Candidate], rules: Rules, now: float, pinned: Collection[int] = ()) -> list[int]:
    """Return the steps to remove, the oldest first; never one that is `pinned`, since it is in use."""
    stay = kept(candidates, rules, now)
    return sorted(c.step for c in candidates if c.step not in stay and c.step not in pinned)


def _first_of_each(good: Sequence[Candidate], amount: int, unit: str) -> list[Candidate]:
    """Return the first checkpoint at or after each multiple; in seconds, the first in each interval of the clock.

    Removals never change the choice: the first one stays as long as any.
    """
    first: dict[int, Candidate] = {}
    unknown = []
    for candidate in good:
        position = {"steps": candidate.step, "tokens": candidate.tokens, "seconds": candidate.time}[unit]
        if position is None:
            unknown.append(candidate)
            continue
        multiple = int(position // amount)
        if multiple or unit == "seconds":  # before the first multiple there is nothing to keep
            first.setdefault(multiple, candidate)
    return [*first.values(), *unknown]


def _best(good: Sequence[Candidate], count: int, mode: str) -> list[Candidate]:
    """Return the `count` best checkpoints, the best first; among equal ones the newer first."""
    sign = -1.0 if mode == "max" else 1.0
    known = [(sign * c.metric, -c.step, c) for c in good if c.metric is not None and math.isfinite(c.metric)]
    return [candidate for _, _, candidate in sorted(known, key=lambda one: one[:2])[:count]]

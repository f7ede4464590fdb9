"""Which checkpoints stay: a pure function of what there is and of the rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from headway.config.checkpoint import RetentionConfig


@dataclass(frozen=True)
class Candidate:
    """One checkpoint, as far as the rules ask."""

    step: int
    time: float
    """Unix seconds at which it was made."""
    metric: float | None = None
    """The metric that tells the best ones, at this very step; None when it is not known."""
    tokens: int | None = None
    """Tokens trained on; None when it is not known, which keeps it where a rule would ask for them."""
    good: bool = True
    """Its manifest can be read."""


def kept(candidates: Iterable[Candidate], rules: RetentionConfig, now: float) -> dict[int, str]:
    """The steps that stay, each with the first rule that keeps it; all others go.

    The newest good one always stays. Checkpoints that are not good count in no rule, so they push out none that is;
    those among the newest stay for somebody to look at.

    Args:
        candidates: In any order, one per step.
        rules: What is to be kept; what any of them keeps, stays.
        now: Unix seconds.
    """
    ordered = sorted(candidates, key=lambda c: c.step)
    good = [c for c in ordered if c.good]
    reasons: dict[int, str] = {}

    def keep(chosen: Iterable[Candidate], why: str) -> None:
        for candidate in chosen:
            reasons.setdefault(candidate.step, why)

    keep(good[-1:], "the newest")
    keep(good[-rules.keep :], f"among the newest {rules.keep}")
    oldest_new = good[-rules.keep :][0].step if good else 0
    keep((c for c in ordered if not c.good and c.step > oldest_new), "cannot be read, and is new")
    if rules.keep_every is not None:
        keep(_first_of_each(good, rules.keep_every.amount, rules.keep_every.unit), f"one every {rules.keep_every}")
    if rules.keep_best:
        keep(_best(good, rules.keep_best), f"among the best {rules.keep_best} by {rules.keep_metric}")
    if rules.keep_for is not None:
        oldest = now - rules.keep_for.amount
        keep((c for c in good if c.time >= oldest), f"younger than {rules.keep_for}")
    return reasons


def outdated(
    candidates: Sequence[Candidate], rules: RetentionConfig, now: float, pinned: Collection[int] = ()
) -> list[int]:
    """The steps that go, the oldest first; never one that is `pinned`, because somebody reads it."""
    stay = kept(candidates, rules, now)
    return sorted(c.step for c in candidates if c.step not in stay and c.step not in pinned)


def _first_of_each(good: Sequence[Candidate], amount: int, unit: str) -> list[Candidate]:
    """The first checkpoint at or after each multiple; by time, the first in each stretch of the clock.

    Which one that is never changes by what is removed: the first stays as long as any.
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


def _best(good: Sequence[Candidate], count: int) -> list[Candidate]:
    """Lowest first; of equal ones the newer."""
    known = [c for c in good if c.metric is not None and math.isfinite(c.metric)]
    return sorted(known, key=lambda c: (c.metric, -c.step))[:count]

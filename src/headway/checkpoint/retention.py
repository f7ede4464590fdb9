"""Which checkpoints stay: a pure function of what there is and of the rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.checkpoint.lineage import UNKNOWN, Origin, ancestors
from headway.core.format import format_seconds

if TYPE_CHECKING:
    from headway.config import Interval, RetentionConfig


class Every(NamedTuple):
    """An interval; the config's is not for the process that writes checkpoints, which is to start at once."""

    amount: int
    unit: str
    """`steps`, `tokens` or `seconds`."""

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit}"

    @classmethod
    def of(cls, interval: Interval | None) -> Every | None:
        """The same as a config has it."""
        return None if interval is None else cls(interval.amount, interval.unit)

    @classmethod
    def parse(cls, record: Sequence[Any] | None) -> Every | None:
        """From its JSON form, a list of two."""
        return None if record is None else cls(int(record[0]), str(record[1]))


@dataclass(frozen=True)
class Rules:
    """What is kept (`config.RetentionConfig`)."""

    keep: int = 3
    keep_every: Every | None = None
    keep_best: int = 0
    keep_metric: str = "evaluation/loss"
    keep_mode: str = "min"
    """`min` or `max`: which metric is best."""
    keep_for_seconds: int | None = None

    @classmethod
    def of(cls, config: RetentionConfig) -> Rules:
        """The rules of a config."""
        age = config.keep_for.amount if config.keep_for is not None else None
        best = config.keep_best, config.keep_metric, config.keep_mode
        return cls(config.keep, Every.of(config.keep_every), *best, age)

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Rules:
        """From its JSON form, the fields by name."""
        return cls(**{**record, "keep_every": Every.parse(record["keep_every"])})


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
    origin: Origin = UNKNOWN
    """What it grew out of."""


def kept(candidates: Iterable[Candidate], rules: Rules, now: float) -> dict[int, str]:
    """The steps that stay, each with the first rule that keeps it; all others go.

    The newest good one always stays. Checkpoints that are not good, or that a run has passed over on its way to the
    newest, count in no rule, so they push out none that does; those among the newest stay for somebody to look at.

    Args:
        candidates: In any order, one per step.
        rules: What is to be kept; what any of them keeps, stays.
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
    odd = (c for c in ordered if c.step not in line and c.step > oldest_new)
    keep(odd, "was passed over or cannot be read, and is new")
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


def _best(good: Sequence[Candidate], count: int, mode: str) -> list[Candidate]:
    """The lowest first, or the highest; of equal ones the newer."""
    sign = -1.0 if mode == "max" else 1.0
    known = [(sign * c.metric, -c.step, c) for c in good if c.metric is not None and math.isfinite(c.metric)]
    return [candidate for _, _, candidate in sorted(known, key=lambda one: one[:2])[:count]]

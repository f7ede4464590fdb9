"""When to save: at the interval of `checkpoint.every`, or with `auto` by the cost of a save against that of a failure.

A save every `tau` seconds costs its own time, and a failure costs half of `tau` on average. The best `tau` follows from
the cost of a save and the mean time between failures (Young 1974, "A first order approximation to the optimum
checkpoint interval"; Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps").
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway.checkpoint.save.outcomes import Outcome
from headway.config.units import Interval
from headway.core.console import notice, write_log
from headway.core.coordination.outcomes import SAVED_OUTCOMES
from headway.core.errors import INTERRUPTED
from headway.core.format import format_seconds
from headway.telemetry.record import RUNNING, open_run
from headway.training.job import Job

DAY_SECONDS = 86400.0
#: Bounds of the interval: below, files come and go all the time; above, too much work is at stake.
SHORTEST_SECONDS = 5.0
LONGEST_SECONDS = 3600.0
#: The interval until the first save has shown what one costs; shorter where failures are so frequent that this share of
#: their mean distance is less.
FIRST_SECONDS = 60.0
_FIRST_SHARE = 0.05
#: Training may wait for saves for no more than this share of the time, whatever the formula says. The background write,
#: which takes processors and a disk, may take no more than the second share.
_MOST_SHARE = 0.005
_MOST_WRITING = 0.1
#: Exit codes of success, config, data, divergence and Ctrl-C: such an end was intended, or recurs at once.
_MISTAKES = (0, 2, 3, 5, INTERRUPTED)
#: Number of saves whose median cost counts: it passes over an outlier, and follows a state that has grown.
_REMEMBERED = 5


def daly_interval(cost_seconds: float, mean_seconds: float) -> float:
    """Return the interval between saves that costs least, in seconds (Daly 2006, equation 37).

    Args:
        cost_seconds: How long training waits for one save (delta).
        mean_seconds: Mean time between failures (M).
    """
    if cost_seconds >= 2 * mean_seconds:
        return mean_seconds
    ratio = cost_seconds / (2 * mean_seconds)
    return math.sqrt(2 * cost_seconds * mean_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


@dataclass(frozen=True)
class FailureRate:
    """How often a run ends unexpectedly."""

    per_day: float
    source: str
    """Source of the rate, in words."""


def failure_rate(run: Path, given: float | None) -> FailureRate:
    """Return the given rate, or an estimate from the run's own attempts.

    The estimate is the mean of the posterior of a Poisson rate, with one failure in one day as prior. So a run without
    failures assumes one a day at first, and fewer the longer none occurs. Preemptions do not count, since the state is
    saved before they take effect.
    """
    if given is not None:
        return FailureRate(given, "checkpoint.failures_per_day")
    try:
        attempts = open_run(run).attempts
    except Exception:  # there is nothing to learn from a directory that cannot be read
        attempts = []
    ended = [attempt for attempt in attempts if attempt.outcome != RUNNING]
    failures = sum(a.outcome not in SAVED_OUTCOMES and a.exit_code not in _MISTAKES for a in ended)
    days = sum(attempt.seconds or 0.0 for attempt in ended) / DAY_SECONDS
    source = f"{failures} unplanned ends in {format_seconds(days * DAY_SECONDS)}" if ended else "none seen yet"
    return FailureRate((failures + 1) / (days + 1), source)


class ChosenInterval:
    """Chooses the seconds between saves from their cost."""

    def __init__(self, failures: FailureRate) -> None:
        self._failures, self._costs = failures, deque[float](maxlen=_REMEMBERED)
        self._writes = deque[float](maxlen=_REMEMBERED)
        first = _FIRST_SHARE * DAY_SECONDS / failures.per_day
        self.seconds = min(max(first, SHORTEST_SECONDS), FIRST_SECONDS)
        """The current interval."""

    def after_save(self, cost_seconds: float) -> float:
        """Return the next interval after a save that held up training; report it the first time."""
        first = not self._costs
        self._costs.append(cost_seconds)
        return self._choose(first)

    def after_write(self, seconds: float) -> float:
        """Return the next interval after a save was written in the background in so many seconds."""
        self._writes.append(seconds)
        return self._choose(first=False) if self._costs else self.seconds

    def _choose(self, first: bool) -> float:
        cost = statistics.median(self._costs)
        before = self.seconds
        best = daly_interval(cost, DAY_SECONDS / self._failures.per_day)
        writing = statistics.median(self._writes) if self._writes else 0.0
        shortest = max(SHORTEST_SECONDS, cost / _MOST_SHARE, writing / _MOST_WRITING)
        self.seconds = min(max(best, shortest), max(LONGEST_SECONDS, shortest))
        if first or not 0.5 < self.seconds / before < 2:
            (notice if first else write_log)(self.describe(cost, best))
        return self.seconds

    def describe(self, cost_seconds: float, best_seconds: float) -> str:
        """Describe the interval and its reasons."""
        limited = "" if abs(best_seconds - self.seconds) < 1 else f" (by the formula {format_seconds(best_seconds)})"
        return (
            f"saving every {format_seconds(self.seconds)}{limited}: a save holds training up for {cost_seconds:.2f} s,"
            f" with {self._failures.per_day:.2g} failures a day ({self._failures.source})"
        )


class SaveSchedule:
    """Decides when a checkpoint is due by time. Workers' clocks differ, so the loop lets them agree.

    Args:
        every: The interval; this schedule ignores intervals of steps and tokens.
        chosen: Chooses the interval when `every` is `auto`; None on the other workers, whose clocks do not count then.
    """

    def __init__(self, every: Interval | Literal["auto"], chosen: ChosenInterval | None = None) -> None:
        self._chosen = chosen if every == "auto" else None
        self._seconds: float | None = None
        if isinstance(every, Interval) and every.unit == "seconds":
            self._seconds = every.amount
        elif self._chosen is not None:
            self._seconds = self._chosen.seconds
        self._start = time.monotonic()

    @classmethod
    def of(cls, job: Job) -> SaveSchedule:
        """Make the schedule of a worker; with `auto`, the first worker's chooses the interval."""
        settings = job.config.checkpoint
        if settings.every != "auto" or not job.world.is_first:
            return cls(settings.every)
        return cls("auto", ChosenInterval(failure_rate(job.config.run_directory, settings.failures_per_day)))

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time a save, during which training waits."""
        start = time.monotonic()
        yield
        self._start = time.monotonic()
        if self._chosen is not None:
            self._seconds = self._chosen.after_save(self._start - start)

    def written(self, outcome: Outcome) -> None:
        """Learn from a finished save how long it took; a failed save does not count."""
        if self._chosen is not None and outcome.error is None:
            self._seconds = self._chosen.after_write(outcome.seconds)

    def due(self) -> bool:
        """Return whether the interval has passed; always False if it is not a time."""
        return self._seconds is not None and time.monotonic() - self._start >= self._seconds


def saves_on_the_way(job: Job) -> bool:
    """Return whether a copy of the state may be needed after the current step and before the last one."""
    settings = job.config.checkpoint
    step = job.state.cursor.step
    last = job.total_steps
    if step >= last - 1:
        return False
    by_step = [every for every in (settings.every, settings.memory_every) if isinstance(every, Interval)]
    if settings.every == "auto" or any(every.unit == "seconds" for every in by_step):
        return True
    return any(job.config.train.batches.is_due_between(every, step, last) for every in by_step)

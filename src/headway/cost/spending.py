"""What a run has spent: every attempt at its own price, the machines that were held between attempts, and storage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core.format import format_usd

#: Average length of a month, by which clouds price storage.
MONTH_SECONDS = 365.25 * 86400 / 12
_GIB = 2**30
_HOUR = 3600.0


@dataclass(frozen=True)
class BilledAttempt:
    """One attempt, as far as its record shows. Times are Unix seconds."""

    number: int
    started: float | None
    ended: float | None
    """The end, or the last sign of life of an attempt that was killed; now for one that runs."""
    seconds: float | None
    """How long it ran, by a monotonic clock; None if unknown."""
    usd_per_hour: float | None
    held_before: bool = False
    """Whether its machines were held since the attempt before, as by a command that starts attempts again."""
    held_seconds: float | None = None
    """For how long, by a monotonic clock; None if unknown, and then the times tell it."""


@dataclass(frozen=True)
class RunCost:
    """The cost of a run in dollars, by part."""

    compute_usd: float
    """While an attempt was running."""
    idle_usd: float
    """Between attempts, while the machines were held."""
    storage_usd: float
    """Of keeping checkpoints, until now."""
    attempts_usd: dict[int, float] = field(default_factory=dict)
    """`compute_usd` by attempt; attempts without a known price or duration are absent."""

    @property
    def total_usd(self) -> float:
        """The sum of all parts."""
        return self.compute_usd + self.idle_usd + self.storage_usd

    @property
    def is_known(self) -> bool:
        """Whether the price of any part is known."""
        return bool(self.attempts_usd) or self.storage_usd > 0

    def __str__(self) -> str:
        parts = {"compute": self.compute_usd, "held between attempts": self.idle_usd, "storage": self.storage_usd}
        shown = " · ".join(f"{name} {format_usd(usd)}" for name, usd in parts.items() if usd > 0)
        return f"cost {format_usd(self.total_usd)}" + (f" · {shown}" if shown else "")


def run_cost(attempts: Sequence[BilledAttempt], storage_usd: float = 0.0) -> RunCost:
    """Add up the cost of attempts, which are in their order, and of storage."""
    compute: dict[int, float] = {}
    idle = 0.0
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        if attempt.seconds is not None and attempt.usd_per_hour is not None:
            compute[attempt.number] = attempt.usd_per_hour * attempt.seconds / _HOUR
        if before is None or not attempt.held_before or before.usd_per_hour is None:
            continue
        idle += before.usd_per_hour * _held(before, attempt) / _HOUR
    return RunCost(sum(compute.values()), idle, storage_usd, compute)


def _held(before: BilledAttempt, attempt: BilledAttempt) -> float:
    """Return for how many seconds machines were held between two attempts; 0 if unknown."""
    if attempt.held_seconds is not None:
        return max(0.0, attempt.held_seconds)
    if before.ended is None or attempt.started is None:
        return 0.0
    return max(0.0, attempt.started - before.ended)


def storage_cost(byte_count: float, seconds: float, usd_per_gib_month: float) -> float:
    """Return the price of keeping so many bytes for a time."""
    return byte_count / _GIB * usd_per_gib_month * max(0.0, seconds) / MONTH_SECONDS


class SpendMeter:
    """Counts what a run has spent while an attempt is running; any thread may read it.

    Args:
        before: Cost of the run until this attempt began.
        usd_per_hour: Price of the machines of this attempt.
        seconds: How long this attempt has been running already.
        storage_usd_per_gib_month: Price of storage.
        stored_bytes: Size of the checkpoints that are kept now.
        clock: Returns seconds that never decrease.
    """

    def __init__(
        self,
        before: RunCost,
        usd_per_hour: float,
        seconds: float = 0.0,
        *,
        storage_usd_per_gib_month: float = 0.0,
        stored_bytes: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.usd_per_hour = usd_per_hour
        self._before = before
        self._clock = clock
        self._start = clock() - seconds
        self._storage_price, self._bytes, self._kept_since = storage_usd_per_gib_month, stored_bytes, clock()
        self._storage_usd = before.storage_usd

    def now(self) -> RunCost:
        """Return the cost until now."""
        running = self.usd_per_hour * (self._clock() - self._start) / _HOUR
        return RunCost(self._before.compute_usd + running, self._before.idle_usd, self._storage())

    def stored(self, byte_count: float) -> None:
        """Note the size of the checkpoints that are kept from now on."""
        self._storage_usd, self._bytes, self._kept_since = self._storage(), byte_count, self._clock()

    def in_seconds(self, seconds: float) -> float:
        """Return what the run will have spent in so many seconds."""
        storage = storage_cost(self._bytes, seconds, self._storage_price)
        return self.now().total_usd + self.usd_per_hour * seconds / _HOUR + storage

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step."""
        cost = self.now()
        found = {"cost/spent_usd": cost.total_usd, "cost/usd_per_hour": self.usd_per_hour}
        if cost.idle_usd:
            found["cost/idle_usd"] = cost.idle_usd
        if self._storage_price:
            found["cost/storage_usd"] = cost.storage_usd
        return found

    def _storage(self) -> float:
        kept = self._clock() - self._kept_since
        return self._storage_usd + storage_cost(self._bytes, kept, self._storage_price)


@dataclass(frozen=True)
class CostBudget:
    """The most that a run may spend."""

    usd: float
    warn: float
    """The share that is announced."""

    def is_near(self, spent_usd: float) -> bool:
        """Whether the announced share is spent."""
        return spent_usd >= self.warn * self.usd

    def must_stop(self, meter: SpendMeter, reserve_seconds: float) -> bool:
        """Whether the run has to save and stop now.

        Args:
            meter: What has been spent.
            reserve_seconds: How long the machines are still needed after the decision.
        """
        return meter.in_seconds(max(0.0, reserve_seconds)) >= self.usd

    def enough_usd(self, spent_usd: float) -> float:
        """Return a round amount with which a run that has spent so much could go on: at least a tenth more."""
        wanted = max(spent_usd, self.usd) * 1.1
        unit = 10.0 ** (math.floor(math.log10(wanted)) - 1)
        return float(f"{math.ceil(round(wanted / unit, 6)) * unit:.12g}")

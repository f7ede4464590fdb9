"""Bandwidths from times, by the formulas of nccl-tests (its doc/PERFORMANCE.md), so that figures are comparable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.statistics import quantile

#: Operation -> factor between algorithm and bus bandwidth for n workers (PERFORMANCE.md, "Summary").
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class Measurement:
    """One collective at one size."""

    operation: str
    size_bytes: int
    """Size of the whole array, which each worker has after an all-gather and before the other operations."""
    repeats: int
    median_seconds: float
    p10_seconds: float
    p90_seconds: float
    algorithm_bytes_per_second: float
    """`S / t`."""
    bus_bytes_per_second: float
    """Load of a link, independent of the number of workers, to compare with the hardware's peak."""


def measurement(operation: str, size_bytes: int, workers: int, seconds: Sequence[float]) -> Measurement:
    """Summarise the times of one collective.

    Args:
        seconds: Time of the slowest worker in each repetition.
    """
    times = sorted(seconds)
    median = quantile(times, 0.5)
    algorithm = size_bytes / median
    return Measurement(
        operation,
        size_bytes,
        len(times),
        median,
        quantile(times, 0.1),
        quantile(times, 0.9),
        algorithm,
        algorithm * BUS_FACTORS[operation](workers),
    )


@dataclass(frozen=True)
class ClockOffset:
    """How far a worker's clock is ahead of the first worker's."""

    worker: int
    seconds: float
    uncertainty_seconds: float
    """Half of the fastest round trip."""

    @property
    def is_wrong(self) -> bool:
        """Whether the clocks surely differ by more than a second."""
        return abs(self.seconds) - self.uncertainty_seconds > 1.0


def clock_offset(worker: int, stamps: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset from several exchanges of time stamps.

    The fastest exchange is the most accurate (RFC 5905, section 8).

    Args:
        stamps: Seconds on this worker's clock when it asks, on the first worker's when it answers, and on this worker's
            when the answer arrives.
    """
    sent, answered, back = min(stamps, key=lambda stamp: stamp[2] - stamp[0])
    return ClockOffset(worker, (sent + back) / 2 - answered, (back - sent) / 2)


@dataclass(frozen=True)
class Communication:
    """The result of the benchmark."""

    workers: int
    machines: int
    device: str
    backend: str
    nccl_profile: str
    measurements: tuple[Measurement, ...]
    clocks: tuple[ClockOffset, ...]

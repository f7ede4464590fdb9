"""Forecasts of time and cost from a speed and a goodput that are known as ranges, and the choice between offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.cost.offers import Offer


@dataclass(frozen=True)
class Range:
    """A value that is known to lie between two bounds."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The value halfway between the bounds."""
        return (self.low + self.high) / 2

    def __mul__(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)


#: Time that is lost to nothing: what a run without interruptions takes.
UNINTERRUPTED = Range(1.0, 1.0)


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take on machines of an offer."""

    offer: Offer
    machines: int
    hours: Range
    usd: Range
    goodput: Range | None
    """Share of the time that counts, as it was measured; None if unknown, and then no time is lost."""

    @property
    def gpus(self) -> int:
        """Number of accelerators."""
        return self.machines * self.offer.gpus


def forecast(offer: Offer, machines: int, hours: Range, goodput: Range | None) -> Forecast:
    """Forecast a run.

    Args:
        offer: Price of one machine.
        machines: Number of machines.
        hours: Time of the run if nothing interrupts it.
        goodput: Share of the time that counts.
    """
    share = goodput or UNINTERRUPTED
    taken = Range(hours.low / share.high, hours.high / share.low)
    return Forecast(offer, machines, taken, taken * (machines * offer.usd_per_hour), goodput)


def cheapest_within(forecasts: Sequence[Forecast], hours: float) -> Forecast | None:
    """Return the cheapest that is done in time even if all goes slowly; None if none is."""
    fitting = [found for found in forecasts if found.hours.high <= hours]
    return min(fitting, key=lambda found: (found.usd.high, found.hours.high, found.offer.key), default=None)


def fastest_within(forecasts: Sequence[Forecast], usd: float) -> Forecast | None:
    """Return the fastest that stays within an amount even if all goes slowly; None if none does."""
    fitting = [found for found in forecasts if found.usd.high <= usd]
    return min(fitting, key=lambda found: (found.hours.high, found.usd.high, found.offer.key), default=None)

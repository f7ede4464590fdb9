"""A week of spot prices that was never recorded, for tests and for trying a policy: a function of its seed alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from headway.clouds.spot.traces import Trace
from headway.core.errors import ConfigError

#: How the price moves between two times: towards its usual one by this share, and by chance by as much as this.
_RETURNS, _SHAKES = 0.05, 0.012
#: By how much it is above and below its usual one in the course of a day.
_DAILY = 0.06
#: A spike multiplies the price by a factor between these, for so many hours.
_FACTORS, _HOURS = (2.0, 2.8), (3.0, 6.0)


@dataclass(frozen=True)
class TraceMaker:
    """What a made trace is like."""

    seed: int = 0
    days: float = 7.0
    spikes: int = 3
    """Number of spikes, each at a random time in an equal part of the trace."""
    usd_per_hour: float = 2.0
    """The usual price."""
    every_seconds: float = 600.0
    """Time between two prices."""

    def make(self) -> Trace:
        """Return the trace; its times count from its beginning.

        The logarithm of the price returns to the usual one while chance moves it (an Ornstein-Uhlenbeck process in
        discrete time, with uniform steps), a day is a wave on it, and spikes multiply it. All of that is bounded:
        without a spike the price is at most 1.35 times the usual one, in a spike at least 1.48 times.

        Raises:
            ConfigError: the spikes do not fit in the days.
        """
        hours = self.days * 24
        if self.spikes and hours / self.spikes < 2 * _HOURS[1]:
            raise ConfigError(
                f"{self.spikes} spikes do not fit in {self.days:g} days", where="--spikes", fix="more --days"
            )
        # Only `random()` gives the same numbers in every version of Python.
        draw = random.Random(self.seed).random
        peaks = [self._spike(number, hours / self.spikes, draw) for number in range(self.spikes)]
        times: list[float] = []
        prices: list[float] = []
        wander = 0.0
        for number in range(int(hours * 3600 / self.every_seconds) + 1):
            seconds = number * self.every_seconds
            wander += -_RETURNS * wander + _SHAKES * (2 * draw() - 1)
            factor = math.exp(wander + _DAILY * math.sin(2 * math.pi * seconds / 86400))
            factor *= math.prod(peak for begins, ends, peak in peaks if begins <= seconds < ends)
            times.append(seconds)
            prices.append(round(self.usd_per_hour * factor, 4))
        return Trace(tuple(times), tuple(prices))

    def _spike(self, number: int, part_hours: float, draw: random.Random.random) -> tuple[float, float, float]:
        """Return when a spike begins and ends, in seconds, and its factor."""
        hours = _HOURS[0] + (_HOURS[1] - _HOURS[0]) * draw()
        begins = part_hours * number + (part_hours - hours) * (0.2 + 0.6 * draw())
        return begins * 3600, (begins + hours) * 3600, _FACTORS[0] + (_FACTORS[1] - _FACTORS[0]) * draw()


def as_csv(trace: Trace) -> str:
    """Return a trace as a file that `read_trace` reads."""
    lines = [f"{seconds:g},{price:g}" for seconds, price in zip(trace.times, trace.prices, strict=True)]
    return "\n".join(["time,usd_per_hour", *lines, ""])

"""Spot prices that were never recorded, for tests and for trying a policy: a function of a seed alone."""

from __future__ import annotations

import math
import random

from headway.clouds.spot.traces import Trace
from headway.core.errors import ConfigError

#: How the price moves between two times: towards its usual one by this share, and by chance by as much as this.
_RETURNS = 0.05
_SHAKES = 0.012
#: By how much it is above and below its usual one in the course of a day.
_DAILY = 0.06
#: A spike multiplies the price by a factor between these, for so many hours.
_FACTORS = (2.0, 2.8)
_HOURS = (3.0, 6.0)


def make_trace(
    seed: int = 0, *, days: float = 7.0, spikes: int = 3, usual_usd: float = 2.0, every_seconds: float = 600.0
) -> Trace:
    """Make a trace whose times count from its beginning.

    The logarithm of the price returns to the usual one while chance moves it (an Ornstein-Uhlenbeck process in discrete
    time, with uniform steps), a day is a wave on it, and spikes multiply it. All of that is bounded: without a spike
    the price is at most 1.35 times the usual one, in a spike at least 1.48 times.

    Args:
        seed: The same seed gives the same prices.
        days: Length.
        spikes: Number of spikes, each somewhere in an equal part of the trace.
        usual_usd: The usual price in dollars per hour.
        every_seconds: Time between two prices.

    Raises:
        ConfigError: the spikes do not fit in the days.
    """
    part = days * 24 / max(1, spikes)
    if spikes and part < 2 * _HOURS[1]:
        raise ConfigError(f"{spikes} spikes do not fit in {days:g} days", where="--spikes", fix="more --days")
    # Only `random()` gives the same numbers in every version of Python.
    draw = random.Random(seed).random
    peaks: list[tuple[float, float, float]] = []
    for number in range(spikes):
        hours = _HOURS[0] + (_HOURS[1] - _HOURS[0]) * draw()
        begins = part * number + (part - hours) * (0.2 + 0.6 * draw())
        peaks.append((begins, begins + hours, _FACTORS[0] + (_FACTORS[1] - _FACTORS[0]) * draw()))
    times = [number * every_seconds for number in range(int(days * 86400 / every_seconds) + 1)]
    prices: list[float] = []
    wander = 0.0
    for hour in (seconds / 3600 for seconds in times):
        wander += -_RETURNS * wander + _SHAKES * (2 * draw() - 1)
        factor = math.exp(wander + _DAILY * math.sin(2 * math.pi * hour / 24))
        factor *= math.prod(peak for begins, ends, peak in peaks if begins <= hour < ends)
        prices.append(round(usual_usd * factor, 4))
    return Trace(tuple(times), tuple(prices))


def as_csv(trace: Trace) -> str:
    """Return a trace as a file that `read_trace` reads."""
    lines = [f"{seconds:g},{price:g}" for seconds, price in zip(trace.times, trace.prices, strict=True)]
    return "\n".join(["time,usd_per_hour", *lines, ""])

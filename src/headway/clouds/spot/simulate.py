"""Cost, time and interruptions of policies on a recorded trace of spot prices.

A trace that is too short is begun again. Prices hold between their times; the simulation moves in steps of at most a
minute, and money is what each step costs at its price.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.clouds.spot.policy import SpotDecider, SpotPolicy, State
from headway.clouds.spot.traces import Trace

_TICK_SECONDS = 60.0
#: A policy that has not finished after so many times the work never will.
_MOST_TIMES = 100.0


@dataclass(frozen=True)
class Work:
    """What a run needs."""

    seconds: float
    """Time of training without interruptions, with the usual workers."""
    start_seconds: float
    """From the start of a machine to the first step."""
    save_seconds: float
    """Of saving before a planned stop."""
    save_every_seconds: float
    """Between saves: work since the newest one is lost when a machine is taken away."""
    growth: float = 1.0
    """How many times as fast, and as dear, the run is with all workers."""


@dataclass(frozen=True)
class Outcome:
    """What a policy came to."""

    policy: str
    usd: float
    seconds: float
    """From the beginning to the end of the work."""
    interruptions: int
    """Stops on the way, planned or not."""
    lost_seconds: float
    """Work that was done twice."""
    finished: bool

    def saving(self, other: Outcome) -> float | None:
        """Return which share of another one's cost is saved, negative if it costs more; None unless both finish."""
        return 1 - self.usd / other.usd if self.finished and other.finished and other.usd else None


def simulate(trace: Trace, work: Work, policy: SpotPolicy, on_demand_usd: float) -> list[Outcome]:
    """Compare a policy with machines on demand, and with spot machines that are never paused.

    Without a policy a spot machine is taken away while its price is above that on demand, which is the most that AWS
    lets one pay by default.
    """
    decider = SpotDecider.begin(policy, trace.prices[0], 0.0)
    return [
        _run("on demand", trace, work, lambda price, now: "running", fixed=on_demand_usd),
        _run("spot, never paused", trace, work, lambda price, now: "paused" if price > on_demand_usd else "running",
             planned=False),
        _run("spot, by the policy", trace, work, decider.decide),
    ]  # fmt: skip


def _run(
    name: str,
    trace: Trace,
    work: Work,
    decide: Callable[[float, float], State],
    *,
    fixed: float | None = None,
    planned: bool = True,
) -> Outcome:
    now = usd = done = saved = lost = 0.0
    # Nothing runs before the first decision, so a first price that is too high interrupts nothing.
    starting = 0.0
    state = "paused"
    interruptions = 0
    length = max(trace.seconds, _TICK_SECONDS)
    while done < work.seconds and now < _MOST_TIMES * max(work.seconds, _TICK_SECONDS) + length:
        spot = trace.price_at(trace.times[0] + now % length)
        price = spot if fixed is None else fixed
        wanted = decide(spot, now)
        if wanted != state:
            if state != "paused":
                interruptions += 1
                if planned:  # saved before the machine is given back
                    usd += price * _factor(state, work) * work.save_seconds / 3600
                    now += work.save_seconds
                    saved = done
                else:
                    lost += done - saved
                    done = saved
            state = wanted
            starting = work.start_seconds
            continue
        if state == "paused":
            now += _TICK_SECONDS
            continue
        speed = _factor(state, work)
        step = min(_TICK_SECONDS, starting if starting > 0 else (work.seconds - done) / speed)
        usd += price * speed * step / 3600
        now += step
        if starting > 0:
            starting -= step
            continue
        done += step * speed
        if done - saved >= work.save_every_seconds * speed:
            saved = done
    return Outcome(name, usd, now, interruptions, lost, done >= work.seconds)


def _factor(state: str, work: Work) -> float:
    return work.growth if state == "grown" else 1.0

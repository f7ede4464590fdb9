"""When to pause, resume and grow a run on spot machines: thresholds of the price, hysteresis and minimum times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.core.errors import ConfigError

State = Literal["running", "grown", "paused"]

#: Shortest time in a state: a start and a save are paid for without progress.
MIN_RUN_SECONDS = 600.0
MIN_PAUSE_SECONDS = 300.0


@dataclass(frozen=True)
class SpotPolicy:
    """Thresholds in dollars per hour, for the price that the feed gives."""

    pause_above: float
    resume_below: float
    grow_below: float | None = None
    """Use all workers below this price; give them back at `resume_below`."""
    min_run_seconds: float = MIN_RUN_SECONDS
    min_pause_seconds: float = MIN_PAUSE_SECONDS

    def check(self) -> None:
        """Check that the thresholds leave room between them.

        Raises:
            ConfigError: they do not.
        """
        given = {
            "--pause-above": self.pause_above,
            "--resume-below": self.resume_below,
            "--grow-below": self.grow_below,
        }
        for option, value in given.items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{value} is not a price above zero", where=option, fix=f"{option} 2.50")
        if self.resume_below > self.pause_above:
            raise ConfigError(
                "a run would resume at a price at which it pauses",
                where="--resume-below, --pause-above",
                fix=f"--resume-below {self.pause_above:g} or less; some distance saves restarts",
            )
        if self.grow_below is not None and self.grow_below > self.resume_below:
            raise ConfigError(
                "a run would grow at a price at which it is paused",
                where="--grow-below, --resume-below",
                fix=f"--grow-below {self.resume_below:g} or less",
            )


class SpotDecider:
    """Follows a price and decides in which state the run should be.

    Args:
        policy: The thresholds.
        now: The time, in seconds of any clock.
        state: The state at that time.
    """

    def __init__(self, policy: SpotPolicy, now: float, state: State = "running") -> None:
        self.state = state
        self._policy = policy
        self._since = now

    @classmethod
    def begin(cls, policy: SpotPolicy, price: float, now: float) -> SpotDecider:
        """Begin at a price, before anything runs: paused above the threshold, and free to change at once, since a
        first start is no change that would cost anything."""
        first: State = "paused" if price > policy.pause_above else "running"
        return cls(policy, now - max(policy.min_pause_seconds, policy.min_run_seconds), first)

    def decide(self, price: float, now: float) -> State:
        """Return the state for a price at a time; it changes only after the minimum time in the one before."""
        wanted = self._wanted(price)
        least = self._policy.min_pause_seconds if self.state == "paused" else self._policy.min_run_seconds
        if wanted != self.state and now - self._since >= least:
            self.state = wanted
            self._since = now
        return self.state

    def _wanted(self, price: float) -> State:
        policy = self._policy
        if price > policy.pause_above:
            return "paused"
        if self.state == "paused" and price >= policy.resume_below:
            return "paused"
        if policy.grow_below is not None and price < policy.grow_below:
            return "grown"
        return "grown" if self.state == "grown" and price < policy.resume_below else "running"

"""The clock condition: times in records, certificates and leases depend on a steady clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.telemetry.metrics import CLOCK_JUMP
from headway.training.conditions.condition import Reading

#: Time services correct a clock by less than this per correction.
_JUMP_SECONDS = 1.0


class ClockJumps:
    """Compares the wall clock with a monotonic one.

    Args:
        wall: Unix seconds.
        steady: Seconds of a clock that is never set.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._steady = steady
        self._apart = wall() - steady()

    def read(self) -> Reading:
        """Report a jump since the last reading."""
        apart = self._wall() - self._steady()
        jump = apart - self._apart
        self._apart = apart
        if abs(jump) < _JUMP_SECONDS:
            return Reading()
        way = "forward" if jump > 0 else "back"
        what = f"the clock went {way} by {abs(jump):.1f} s (set, or the machine was suspended): times in records do too"
        return Reading({CLOCK_JUMP: jump}, {"clock": what})
